"""Profile steps of `recipes/gpt.py` with its own --profile, and print where the time goes.

The text is generated. The device's time is summed as in `_profile_epoch.py`. The trace
itself is kept, for TensorBoard or Perfetto.

    python benchmarks/_profile_gpt.py --output build/benchmarks/profile -- --size 124m
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from _profile_epoch import busy_and_gaps, device_lines, show, summed
from _side_by_side import machine

RECIPE = Path(__file__).parents[1] / "recipes" / "gpt.py"


def write_text(path: Path, words: int = 200_000) -> Path:
    """Write words of generated letters, about five bytes each."""
    rng = np.random.default_rng(0)
    letters = rng.integers(ord("a"), ord("z") + 1, (words, 4), np.uint8)
    letters = np.pad(letters, ((0, 0), (0, 1)), constant_values=ord(" "))
    path.write_bytes(letters.tobytes())
    return path


def profile(output: Path, steps: str, options: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = run(Path(folder), steps, options)
        lines = list(device_lines(path))
        shutil.copy(path, output)
    busy, gaps = busy_and_gaps(lines)
    return {
        "steps": steps,
        "options": options,
        "seconds": {
            "total": busy + sum(gaps),
            "device busy": busy,
            "idle between operations": sum(gaps),
            "longest gap": max(gaps, default=0.0),
        },
        "kinds": summed(lines, lambda event: event.kind),
        "operations": summed(lines, lambda event: f"{event.name}, {event.module}"),
    }


def run(folder: Path, steps: str, options: list[str]) -> Path:
    """Train, and return the path of the trace."""
    data = write_text(folder / "words.txt")
    last = int(steps.partition(":")[2])
    shared = {
        "--data": data,
        "--steps": last + 1,
        "--profile": steps,
        "--eval-windows": 16,
        "--length": 0,
        "--output": folder / "run",
    }
    arguments = [str(each) for pair in shared.items() for each in pair]
    subprocess.run([sys.executable, str(RECIPE), *arguments, *options], check=True)
    (path,) = folder.rglob("*.xplane.pb")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", default="10:15", metavar="START:STOP")
    parser.add_argument("--top", type=int, default=20, help="rows to show")
    parser.add_argument("--output", type=Path, metavar="DIR", required=True)
    parser.add_argument("options", nargs="*", help="more options of the recipe, after --")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    results = profile(args.output, args.steps, args.options)
    results = machine() | results
    show(f"steps {args.steps}", results, args.top)
    (args.output / "profile.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
