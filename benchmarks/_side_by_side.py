"""What the benchmarks share: contestants take turns, and what they took is written down."""

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import matplotlib
from rich.console import Console
from rich.table import Table

matplotlib.use("Agg")
from matplotlib import pyplot as plt

#: One turn of a contestant: does its work once, and returns what is measured.
Turn = Callable[[], float]

_Found = TypeVar("_Found")

_PACKAGES = (
    "eqxshard",
    "jax",
    "jaxlib",
    "equinox",
    "optax",
    "grain",
    "flax",
    "numpy",
    "orbax-checkpoint",
    "torch",
)


@dataclass(frozen=True)
class Contest:
    """The figures of several contestants at the same task, the measure first.

    - `title`: what the task is, such as `depth 4`.
    - `unit`: of the figures.
    - `values`: for each contestant one figure for each round.
    """

    title: str
    unit: str
    values: Mapping[str, Sequence[float]]

    def ratio(self, name: str) -> float:
        """The median over rounds of a contestant's figure by the measure's."""
        measure = next(iter(self.values.values()))
        return statistics.median(a / b for a, b in zip(self.values[name], measure))


@dataclass(frozen=True)
class Report:
    """All that one benchmark found, and where.

    - `name`: the benchmark's, and that of its files.
    - `contests`: what was measured.
    - `setting`: whatever else decides the figures.
    """

    name: str
    contests: Sequence[Contest]
    setting: Mapping[str, Any] = field(default_factory=dict)

    def show_and_write(self, output: Path | None) -> None:
        """Print the tables, and write NAME.json and NAME.png into a folder."""
        console = Console(width=110)
        for contest in self.contests:
            table = Table(
                "", contest.unit, "min to max", "ratio", title=contest.title, expand=False
            )
            for name, values in contest.values.items():
                low, middle, high = map(
                    _digits, (min(values), statistics.median(values), max(values))
                )
                ratio = f"{contest.ratio(name):.3g}"
                table.add_row(name, middle, f"{low} to {high}", ratio)
            console.print(table)
        found = {"name": self.name, **machine(), **self.setting}
        console.print(", ".join(f"{key}: {value}" for key, value in found.items()))
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
            found["contests"] = [
                asdict(contest)
                | {"ratios": {name: contest.ratio(name) for name in contest.values}}
                for contest in self.contests
            ]
            (output / f"{self.name}.json").write_text(json.dumps(found, indent=1) + "\n")
            self._plot(output / f"{self.name}.png")

    def _plot(self, path: Path) -> None:
        heights = [0.9 + 0.32 * len(contest.values) for contest in self.contests]
        figure, axes = plt.subplots(
            len(heights),
            figsize=(9, sum(heights)),
            squeeze=False,
            gridspec_kw={"height_ratios": heights},
            layout="constrained",
        )
        for contest, ax in zip(self.contests, axes[:, 0]):
            names = list(contest.values)[::-1]
            medians = [statistics.median(contest.values[name]) for name in names]
            ends = [
                [m - min(contest.values[n]) for n, m in zip(names, medians)],
                [max(contest.values[n]) - m for n, m in zip(names, medians)],
            ]
            colors = ["#c44e52" if "eqxshard" in name else "#8da0cb" for name in names]
            ax.barh(names, medians, xerr=ends, color=colors, ecolor="#444444", height=0.7)
            if max(medians) > 30 * min(medians) > 0:
                ax.set_xscale("log")
            ax.set_title(contest.title, loc="left", fontsize=10)
            ax.set_xlabel(contest.unit, fontsize=9)
            ax.tick_params(labelsize=8)
            ax.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, dpi=120)
        plt.close(figure)


def take_turns(
    turns: Mapping[str, Callable[[], _Found]], rounds: int
) -> dict[str, list[_Found]]:
    """Let contestants take turns, round by round, and return their figures.

    A turn that measures several things at once may return them all.

    Whatever else the machine does meets them alike. A first round warms up and is not
    counted; each round begins with another contestant, as each leaves the caches, and the
    clock of the processor, to the next.
    """
    values: dict[str, list[_Found]] = {name: [] for name in turns}
    for turn in turns.values():
        turn()
    for number in range(rounds):
        names = [*turns]
        first = number % len(names)
        for name in names[first:] + names[:first]:
            values[name].append(turns[name]())
    return values


def machine() -> dict[str, Any]:
    """When and where this is."""
    # Not at the top: a benchmark says how many devices there are before JAX looks.
    import jax

    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    device = jax.devices()[0]
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "platform": device.platform,
        "device": device.device_kind,
        "devices": jax.device_count(),
        "versions": versions,
    }


def parser(description: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--rounds", type=int, default=rounds)
    made.add_argument(
        "--output", type=Path, metavar="DIR", help="where to write the figures and the plot"
    )
    return made


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [
        line.partition(":")[2].strip() for line in lines if line.startswith("model name")
    ]
    return names[0] if names else platform.machine()


def _digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
