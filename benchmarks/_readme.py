"""Write the tables of the README and of docs/pages/performance.md.

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`; its figures are
those in benchmarks/results.

    python benchmarks/_readme.py
"""

import json
import re
import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "pages" / "performance.md")

COLUMNS = ("eqxshard", "JAX by hand", "Equinox", "Flax NNX, Grain", "PyTorch")

#: The rows of the table `summary`: what is measured, the benchmark, the start of the
#: contest's title, and the contestant of each column.
SUMMARY: dict[str, tuple[str, str, Sequence[str | None]]] = {
    "training step, MLP of 4 layers": (
        "step_overhead",
        "depth 4",
        (
            "eqxshard, nonfinite='skip'",
            "jax.jit, flattened by hand",
            "equinox.filter_jit",
            "Flax NNX, nnx.split and jax.jit",
            None,
        ),
    ),
    "LeNet on Fashion-MNIST": (
        "epoch",
        "lenet",
        (
            "eqxshard, 1 device",
            "JAX by hand, NumPy batches",
            "Equinox's own page, 1 device",
            "Flax NNX + Grain",
            "PyTorch",
        ),
    ),
    "shuffled images from memory": (
        "data",
        "from memory",
        (
            "eqxshard, 1 device(s)",
            "NumPy, jax.device_put",
            None,
            "Grain, per record",
            "PyTorch, whole batches",
        ),
    ),
    "process start to first step": (
        "start",
        "start to first step",
        (
            "eqxshard, no cache",
            "JAX by hand, no cache",
            "Equinox's own page, no cache",
            "Flax NNX + Grain, no cache",
            "PyTorch",
        ),
    ),
    "a small GPT": (
        "gpt",
        "small",
        ("eqxshard, 1 device", None, None, None, "PyTorch"),
    ),
}


def read(name: str) -> dict[str, Any]:
    """The results of a benchmark."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def summary() -> str:
    """The README's table: a row for each of `SUMMARY`, a column for each contestant."""
    rows, found = [], {name: read(name) for name, _, _ in SUMMARY.values()}
    for says, (name, title, contestants) in SUMMARY.items():
        contests = found[name]["contests"]
        contest = next(c for c in contests if c["title"].startswith(title))
        values = [contest["values"].get(each) for each in contestants]
        cells = [
            "" if each is None else _digits(statistics.median(each)) for each in values
        ]
        cells[0] = f"**{cells[0]}**"
        rows.append(f"| {says} | {contest['unit']} | {' | '.join(cells)} |")
    head = ["| | |" + "".join(f" {column} |" for column in COLUMNS)]
    head += [f"|---|---|{'--:|' * len(COLUMNS)}"]
    return "\n".join([*head, *rows, "", _where(next(iter(found.values())))])


def table(name: str) -> str:
    """Every figure of a benchmark, and where it was measured."""
    found, rows = read(name), []
    for contest in found["contests"]:
        says = f"{contest['title']}, {contest['unit']}"
        for contestant, values in contest["values"].items():
            low, high = _digits(min(values)), _digits(max(values))
            cells = [
                says,
                f"**{contestant}**" if "eqxshard" in contestant else contestant,
                _digits(statistics.median(values)),
                "" if low == high else f"{low} to {high}",
                f"{contest['ratios'][contestant]:.3g}",
            ]
            rows.append(f"| {' | '.join(cells)} |")
            says = ""
    head = ["| | | median | min to max | ratio |", "|---|---|--:|--:|--:|"]
    return "\n".join([*head, *rows, "", _where(found)])


def updated(page: str) -> str:
    """A page with its tables written anew."""

    def write(match: re.Match[str]) -> str:
        text = summary() if match[2] == "summary" else table(match[2])
        return f"{match[1]}\n{text}\n{match[3]}"

    marks = r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)"
    return re.sub(marks, write, page, flags=re.DOTALL)


def _where(found: dict[str, Any]) -> str:
    versions = ", ".join(
        f"{package} {found['versions'][package]}"
        for package in ("jax", "equinox", "flax", "torch", "grain")
        if package in found["versions"]
    )
    device = f"{found['cores']} cores of an {found['cpu']}"
    if found["platform"] != "cpu":
        device = f"{found['devices']} x {found['device']}"
    python = found["versions"]["python"]
    text = f"Measured {found['date']} on {device}; Python {python}, {versions}."
    return textwrap.fill(text, 100, break_on_hyphens=False)


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(updated(page.read_text()))
