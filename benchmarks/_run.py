"""Run the benchmarks one after the other: `nox -s bench`.

All take at most 40 minutes on two cores. A failure does not keep the others from running.

    python benchmarks/_run.py
    python benchmarks/_run.py epoch data
"""

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
OUTPUT = HERE.parent / "build" / "benchmarks"

#: The options with which all take that time on two cores. By default, scripts do more.
OPTIONS = {
    "memory": "",
    "gpu_compiled": "",
    "backtest": "",
    "fit_overhead": "--rounds 10",
    "step_overhead": "--rounds 15",
    "checkpoint": "--rounds 3 --gigabytes 0.5",
    "start": "--rounds 2",
    "first_call": "--rounds 2",
    "scaling": "--rounds 3 --steps 10",
    "growth": "--rounds 3 --depths 4 16 --listed 12 48 192",
    "gpt": "--rounds 4",
    "data": "--rounds 3 --devices 1 2 --mapped-gigabytes 0.5",
    "images": "--rounds 3 --images 600",
    "epoch": "--models lenet --rounds 1",
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(OPTIONS))
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="DIR")
    args = parser.parse_args()
    for name in args.names:
        if name not in OPTIONS:
            parser.error(
                f"there is no benchmark {name!r}; use one of {', '.join(OPTIONS)}."
            )
    args.output.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in args.names or OPTIONS:
        print(f"== {name}", flush=True)
        options = [*OPTIONS[name].split(), "--output", str(args.output)]
        command = [sys.executable, str(HERE / f"{name}.py"), *options]
        if subprocess.run(command).returncode != 0:
            failed.append(name)
    if failed:
        print(f"== failed: {', '.join(failed)}; see their output above.", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
