"""Shared by all benchmarks: contestants take turns, and their figures are reported."""

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

import jax
import matplotlib
import numpy as np
from rich.console import Console
from rich.table import Table

matplotlib.use("Agg")
from matplotlib import pyplot as plt

#: Text and lines, on pages that are light or dark: as far from white as from near black.
_INK = "#7f7f7f"
_STYLE: dict[Any, Any] = {f"{name}.color": _INK for name in ("text", "xtick", "ytick")} | {
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "axes.titlecolor": _INK,
}

#: One turn of a contestant: does its work once and returns the measured figure.
Turn = Callable[[], float]

_Figures = TypeVar("_Figures")

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
    """The figures of several contestants at the same task, the baseline first.

    - `title`: the task, such as `depth 4`.
    - `unit`: the unit of the figures.
    - `values`: one figure per round for each contestant.
    """

    title: str
    unit: str
    values: Mapping[str, Sequence[float]]

    def ratio(self, name: str) -> float:
        """The median over rounds of a contestant's figure divided by the baseline's."""
        baseline = next(iter(self.values.values()))
        return statistics.median(a / b for a, b in zip(self.values[name], baseline))


@dataclass(frozen=True)
class Growth:
    """Contests at one task of growing size.

    - `title`: the task and its size, such as `a step by the number of parameters`.
    - `sizes`: one for each contest.
    - `contests`: contests of the same contestants, one for each size.
    """

    title: str
    sizes: Sequence[float]
    contests: Sequence[Contest]

    @property
    def exponents(self) -> dict[str, float]:
        """For each contestant, the power of the size that fits its figures best.

        A straight line through the logarithms of size and median.
        """
        if len(set(self.sizes)) < 2:
            return {}
        sizes = np.log(self.sizes)
        return {
            name: float(np.polyfit(sizes, np.log(medians), 1)[0])
            for name, medians in self.medians.items()
        }

    @property
    def medians(self) -> dict[str, list[float]]:
        """For each contestant, the figure at each size."""
        return {
            name: [statistics.median(contest.values[name]) for contest in self.contests]
            for name in self.contests[0].values
        }


@dataclass(frozen=True)
class Report:
    """All results of one benchmark.

    - `name`: the name of the benchmark and of its files.
    - `contests`: the measurements.
    - `setting`: options of the benchmark that affect the figures.
    - `growths`: more measurements, plotted as lines over a size.
    """

    name: str
    contests: Sequence[Contest]
    setting: Mapping[str, Any] = field(default_factory=dict)
    growths: Sequence[Growth] = ()

    def show_and_write(self, output: Path | None) -> None:
        """Print the tables, and write NAME.json and NAME.png to a folder, if given."""
        console = Console(width=110)
        grown = [contest for growth in self.growths for contest in growth.contests]
        contests = [*self.contests, *grown]
        for contest in contests:
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
        for growth in self.growths:
            fitted = [f"{name}: {power:.2f}" for name, power in growth.exponents.items()]
            console.print(f"{growth.title}, fitted exponents: {', '.join(fitted)}")
        results = {"name": self.name, **machine(), **self.setting}
        console.print(", ".join(f"{key}: {value}" for key, value in results.items()))
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
            results["contests"] = [
                asdict(contest)
                | {"ratios": {name: contest.ratio(name) for name in contest.values}}
                for contest in contests
            ]
            results["growths"] = [
                {"title": each.title, "sizes": each.sizes, "exponents": each.exponents}
                for each in self.growths
            ]
            (output / f"{self.name}.json").write_text(json.dumps(results, indent=1) + "\n")
            self.plot(output / f"{self.name}.png")

    @matplotlib.rc_context(_STYLE)
    def plot(self, path: Path) -> None:
        """Draw the figures without a background, for pages of any colour."""
        heights = [0.9 + 0.32 * len(contest.values) for contest in self.contests]
        heights += [3.2] * len(self.growths)
        figure, axes = plt.subplots(
            len(heights),
            figsize=(9, sum(heights)),
            squeeze=False,
            gridspec_kw={"height_ratios": heights},
            layout="constrained",
        )
        for shown, ax in zip([*self.contests, *self.growths], axes[:, 0]):
            if isinstance(shown, Growth):
                _draw_lines(shown, ax)
            else:
                _draw_bars(shown, ax)
            ax.set_title(shown.title, loc="left", fontsize=10)
            ax.tick_params(labelsize=8)
            ax.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, dpi=120, transparent=True)
        plt.close(figure)


def read_report(results: Mapping[str, Any]) -> Report:
    """The figures that a report wrote as JSON, to be drawn again."""
    contests = [
        Contest(each["title"], each["unit"], each["values"]) for each in results["contests"]
    ]
    growths, end = [], len(contests)
    for each in reversed(results.get("growths", ())):
        start = end - len(each["sizes"])
        growths.insert(0, Growth(each["title"], each["sizes"], contests[start:end]))
        end = start
    return Report(results["name"], contests[:end], growths=growths)


def _draw_bars(contest: Contest, ax: Any) -> None:
    names = list(contest.values)[::-1]
    medians = [statistics.median(contest.values[name]) for name in names]
    ends = [
        [m - min(contest.values[n]) for n, m in zip(names, medians)],
        [max(contest.values[n]) - m for n, m in zip(names, medians)],
    ]
    colors = ["#c44e52" if "eqxshard" in name else "#8da0cb" for name in names]
    ax.barh(names, medians, xerr=ends, color=colors, ecolor="#5f5f5f", height=0.7)
    if max(medians) > 30 * min(medians) > 0:
        ax.set_xscale("log")
    ax.set_xlabel(contest.unit, fontsize=9)


def _draw_lines(growth: Growth, ax: Any) -> None:
    styles = {True: iter(("o-", "^-", "v-")), False: iter(("s--", "D--", "x--"))}
    for name, medians in growth.medians.items():
        ours = "eqxshard" in name
        power = growth.exponents.get(name)
        label = name if power is None else f"{name}: exponent {power:.2f}"
        color = "#c44e52" if ours else "#8da0cb"
        ax.plot(growth.sizes, medians, next(styles[ours]), color=color, label=label)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xticks(growth.sizes, [f"{size:,}" for size in growth.sizes])
    ax.minorticks_off()
    ax.set_ylabel(growth.contests[0].unit, fontsize=9)
    ax.legend(fontsize=8, frameon=False)


def take_turns(
    turns: Mapping[str, Callable[[], _Figures]], rounds: int
) -> dict[str, list[_Figures]]:
    """Let contestants take turns, round by round, and return the results of each.

    Taking turns spreads other load on the machine evenly over the contestants. The first
    round is a warm-up and is not counted. Each round starts with a different contestant,
    because each one affects the CPU's caches and clock speed for the next.
    """
    values: dict[str, list[_Figures]] = {name: [] for name in turns}
    for turn in turns.values():
        turn()
    for number in range(rounds):
        names = [*turns]
        first = number % len(names)
        for name in names[first:] + names[:first]:
            values[name].append(turns[name]())
    return values


def machine() -> dict[str, Any]:
    """The date, the machine and the versions of packages."""
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
    """A parser with the options common to all benchmarks."""
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--rounds", type=int, default=rounds)
    options.add_argument(
        "--output", type=Path, metavar="DIR", help="write the figures and the plot here"
    )
    return options


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
