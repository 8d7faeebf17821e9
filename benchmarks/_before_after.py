"""Compare the benchmarks of two checkouts, to see if a change made anything slower.

Each checkout runs its own benchmarks on its own eqxshard, so their APIs may differ. A round
runs a benchmark once in each checkout, in new processes, and every other round starts with
the other checkout. The table has the median over rounds for each checkout, and the ratio:
this checkout's figure divided by the other's in the same round, its median, smallest and
largest. The other contestants are the same code in both checkouts, so their ratios show the
noise. The last column is the ratio divided by that of the first contestant, which ran at
the same time: on a busy machine it says more.

    git worktree add --detach ../before COMMIT
    python benchmarks/_before_after.py ../before
    python benchmarks/_before_after.py ../before step_overhead start --rounds 9
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parents[1]

#: The options of one run, which takes about a minute on two cores.
OPTIONS = {
    "step_overhead": "--rounds 5",
    "epoch": "--rounds 1 --models lenet --devices 1 --examples 9600 --device cpu",
    "data": "--rounds 1 --seconds 0.1 --mapped-gigabytes 0.1 --workers 1",
    "gpt": "--rounds 2 --steps 10 --device cpu",
    "start": "--rounds 1",
    "checkpoint": "--rounds 1",
}

#: The figures of one run of a benchmark, by contest, unit and contestant.
Figures = dict[tuple[str, str, str], float]


def measure(checkout: Path, name: str, options: Sequence[str]) -> Figures:
    """Run a benchmark of a checkout."""
    script = checkout / "benchmarks" / f"{name}.py"
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, str(script), *options, "--output", folder],
            env={**os.environ, "PYTHONPATH": str(checkout)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode != 0:
            raise SystemExit(
                f"{done.stdout}\nerror: {script} failed; see its output above."
            )
        contests = json.loads((Path(folder) / f"{name}.json").read_text())["contests"]
    return {
        (contest["title"], contest["unit"], contestant): statistics.median(values)
        for contest in contests
        for contestant, values in contest["values"].items()
    }


def compare(name: str, before: Sequence[Figures], after: Sequence[Figures]) -> Table:
    """The figures of all rounds, where both checkouts have them."""
    table = Table("", "before", "after", "after / before", "beside the first", title=name)
    rows: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    firsts: dict[str, list[float]] = {}
    for key in before[0]:
        if key not in after[0]:
            continue
        title, unit, contestant = key
        heading = f"{title}, {unit}"
        old, new = ([each[key] for each in run] for run in (before, after))
        ratios = [b / a for a, b in zip(old, new, strict=True)]
        first = firsts.setdefault(heading, ratios)
        beside = statistics.median(a / b for a, b in zip(ratios, first, strict=True))
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        medians = (f"{statistics.median(each):.4g}" for each in (old, new))
        ratio = f"{statistics.median(ratios):.3f}, {spread}"
        rows[heading].append((contestant, *medians, ratio, f"{beside:.3f}"))
    for heading, found in rows.items():
        table.add_section()
        table.add_row(f"[bold]{heading}")
        for row in found:
            table.add_row(*row)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, metavar="CHECKOUT")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(OPTIONS))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    checkouts = {"before": args.before.resolve(), "after": HERE}
    for name in args.names or OPTIONS:
        if name not in OPTIONS:
            parser.error(
                f"there is no benchmark {name!r}; use one of {', '.join(OPTIONS)}."
            )
        options = OPTIONS[name].split()
        found: dict[str, list[Figures]] = {side: [] for side in checkouts}
        for number in range(args.rounds):
            for side in [*checkouts][:: 1 if number % 2 == 0 else -1]:
                found[side].append(measure(checkouts[side], name, options))
        Console(width=110).print(compare(name, found["before"], found["after"]))


if __name__ == "__main__":
    main()
