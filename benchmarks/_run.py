"""Run the benchmarks one after the other: `nox -s bench`.

All take at most 40 minutes on two cores. A benchmark that has been measured is skipped, so
a run that was interrupted goes on with the one that it was at: a result counts if it is of
this code, on this machine, with these packages and options. Those that the command names
are measured again. A failure does not keep the others from running.

    python benchmarks/_run.py
    python benchmarks/_run.py epoch data
"""

import argparse
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
OUTPUT = HERE.parent / "build" / "benchmarks"


@dataclass(frozen=True)
class Entry:
    """How a benchmark is run: the minutes it takes on two cores, and its options."""

    minutes: float
    options: str = ""


#: What two cores can do in the time. The scripts by themselves do more.
ENTRIES = {
    "memory": Entry(1.5),
    "gpu_compiled": Entry(3),
    "fit_overhead": Entry(1, "--rounds 10"),
    "step_overhead": Entry(2.5, "--rounds 15"),
    "checkpoint": Entry(2, "--rounds 3 --gigabytes 0.5"),
    "start": Entry(3, "--rounds 2"),
    "scaling": Entry(4, "--rounds 3 --steps 10"),
    "growth": Entry(4.5, "--rounds 3 --depths 4 16 --listed 12 48 192"),
    "gpt": Entry(2.5, "--rounds 4"),
    "data": Entry(4, "--rounds 3 --devices 1 2 --mapped-gigabytes 0.5"),
    "images": Entry(2.5, "--rounds 3 --images 600"),
    "epoch": Entry(9.5, "--models lenet --rounds 1"),
}


def find_setting() -> dict[str, Any]:
    """What all results depend on: the code, the machine, the versions of packages."""
    # In a process of its own, which is gone when the benchmarks run.
    code = "import json, _side_by_side; print(json.dumps(_side_by_side.machine()))"
    setting = json.loads(output_of(sys.executable, "-c", code))
    del setting["date"]
    commit = output_of("git", "rev-parse", "HEAD").strip()
    changes = hashlib.sha256(output_of("git", "diff", "HEAD").encode()).hexdigest()
    return {**setting, "commit": commit, "changes": changes}


def output_of(*command: str) -> str:
    done = subprocess.run(command, cwd=HERE, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def read_run(output: Path, name: str) -> dict[str, Any]:
    """The setting and the seconds of the last run that ended well; empty if none did."""
    file = output / f"{name}.run.json"
    return json.loads(file.read_text()) if file.exists() else {}


def run(name: str, entry: Entry, setting: dict[str, Any], output: Path) -> bool:
    """Run a benchmark; note it if it wrote a result. Return whether it ended well."""
    start, result = time.time(), output / f"{name}.json"
    script, to = str(HERE / f"{name}.py"), ["--output", str(output)]
    code = subprocess.run([sys.executable, script, *entry.options.split(), *to]).returncode
    # One that lacks something says so, and writes nothing.
    if code == 0 and result.exists() and result.stat().st_mtime >= start - 1:
        done = {"setting": setting, "seconds": time.time() - start}
        (output / f"{name}.run.json").write_text(json.dumps(done))
    return code == 0


def run_all(names: Sequence[str], again: bool, output: Path) -> list[str]:
    """Run those that have no result yet, or all; return those that failed."""
    output.mkdir(parents=True, exist_ok=True)
    shared, failed = find_setting(), []
    settings = {name: shared | {"options": ENTRIES[name].options} for name in names}
    last = {name: read_run(output, name) for name in names}
    left = [name for name in names if again or last[name].get("setting") != settings[name]]
    for name in names:
        if name not in left:
            say(f"{name} has been measured; name it to measure it again.")
    expected = {
        name: last[name].get("seconds", ENTRIES[name].minutes * 60) / 60 for name in left
    }
    start = time.monotonic()
    for number, name in enumerate(left):
        elapsed = (time.monotonic() - start) / 60
        rest = sum(expected[each] for each in left[number:])
        say(
            f"{number + 1} of {len(left)}: {name}, about {expected[name]:.1f} min | "
            f"{elapsed:.1f} min so far, about {rest:.0f} min left"
        )
        if not run(name, ENTRIES[name], settings[name], output):
            say(f"{name} FAILED; see its output above.")
            failed.append(name)
    say(f"{len(left)} benchmarks in {(time.monotonic() - start) / 60:.1f} min: {output}")
    return failed


def say(text: str) -> None:
    print(f"== {text}", flush=True)


def main() -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ENTRIES))
    options.add_argument("--output", type=Path, default=OUTPUT, metavar="DIR")
    args = options.parse_args()
    for name in args.names:
        if name not in ENTRIES:
            options.error(
                f"there is no benchmark {name!r}; use one of {', '.join(ENTRIES)}."
            )
    try:
        failed = run_all(args.names or [*ENTRIES], bool(args.names), args.output)
    except KeyboardInterrupt:
        say("interrupted; the same command goes on with this benchmark.")
        return 130
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
