"""Writes the table of the README from the figures in benchmarks/results."""

import json
import statistics
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- benchmarks -->", "<!-- end of benchmarks -->"

#: Which contests of which benchmarks, in order, and what they are called there.
SHOWN = {
    "step_overhead": {
        "depth 4": "A training step of a tiny MLP of 4 layers",
        "depth 48": "The same of 48 layers",
    },
    "epoch": {
        "lenet": "An epoch of Fashion-MNIST, LeNet, with evaluation",
        "cnn": "The same, a larger CNN",
    },
    "data": {
        "from memory": "Batches of 256 shuffled images, from memory",
        "from ArrayRecord": "The same from ArrayRecord files",
    },
    "start": {"start to first step of LeNet": "From process start to the first step"},
    "memory": {"one device": "Memory of a compiled step"},
}


def table(results: Path = RESULTS) -> str:
    """The lines between the marks of the README."""
    rows, last = [], {}
    for name, titles in SHOWN.items():
        if not (results / f"{name}.json").exists():
            continue
        last = json.loads((results / f"{name}.json").read_text())
        contests = {contest["title"]: contest for contest in last["contests"]}
        for title, says in titles.items():
            found = [full for full in contests if full.startswith(title)]
            if found:
                rows += _rows(says, contests[found[0]])
    versions = ", ".join(
        f"{package} {last['versions'][package]}"
        for package in ("jax", "equinox", "flax", "torch")
    )
    where = f"{last['date']}, {last['cores']} cores of an {last['cpu']}, no accelerator"
    return "\n".join(
        [
            f"{where}; Python {last['versions']['python']}, {versions}.",
            "Medians; a ratio is of a figure by the first contestant's in the same round.",
            "",
            "| | | median | min to max | ratio |",
            "|---|---|--:|--:|--:|",
            *rows,
        ]
    )


def _rows(says: str, contest: dict[str, Any]) -> list[str]:
    rows = []
    for name, values in contest["values"].items():
        low, middle, high = (
            f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
            for value in (min(values), statistics.median(values), max(values))
        )
        ratio = f"{contest['ratios'][name]:.3g}"
        ours = f"**{name}**" if "eqxshard" in name else name
        rows.append(
            f"| {says} | {ours} | {middle} {contest['unit']} | {low} to {high} | {ratio} |"
        )
        says = ""
    return rows


def updated(readme: str) -> str:
    """The README with the table of now."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    page = ROOT / "README.md"
    page.write_text(updated(page.read_text()))
