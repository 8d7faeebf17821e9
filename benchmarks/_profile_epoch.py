"""Profile one epoch of LeNet with JAX's profiler, and print where the time goes.

The epoch is that of eqxshard in `epoch.py`, with the data on the device, followed by an
evaluation. It is traced after a first epoch that compiles. The device's time is summed by
operation and by kind of operation; time inside nested operations counts for those only.
Wall time minus the time that the device is busy is time that it waits for the host.

    python benchmarks/_profile_epoch.py --output build/benchmarks
"""

import argparse
import collections
import importlib
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import epoch
import jax
from _peers._task import Task
from _side_by_side import machine
from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).parent / "_peers"))


class Event(NamedTuple):
    """One operation on one line of a device: a GPU's stream or a CPU's thread."""

    start: float
    end: float
    name: str
    module: str

    @property
    def kind(self) -> str:
        """The name without its number: `convolution` for `convolution.12`."""
        return re.sub(r"(\.\d+|\.clone|\.remat)+$", "", self.name)


def device_lines(path: Path) -> Iterator[list[Event]]:
    """The operations of each line, sorted by start, with times in nanoseconds."""
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        on_gpu = plane.name.startswith("/device:GPU")
        for line in plane.lines:
            # A GPU's other lines repeat the operations of its streams.
            if on_gpu and "Stream" not in (line.name or ""):
                continue
            events = []
            for event in line.events:
                stats = dict(event.stats)
                if on_gpu or "hlo_op" in stats:
                    end = event.start_ns + event.duration_ns
                    name = str(stats.get("hlo_op", event.name))
                    module = str(stats.get("hlo_module", ""))
                    events.append(Event(event.start_ns, end, name, module))
            if events:
                yield sorted(events, key=lambda event: (event.start, -event.end))


def summed(
    lines: list[list[Event]], key: Callable[[Event], str]
) -> dict[str, dict[str, float]]:
    """Seconds and number of operations by key, without the time of nested operations."""
    totals = collections.defaultdict(lambda: {"seconds": 0.0, "count": 0.0})
    for events in lines:
        enclosing: list[Event] = []
        for event in events:
            seconds = (event.end - event.start) / 1e9
            while enclosing and enclosing[-1].end <= event.start:
                enclosing.pop()
            if enclosing:
                totals[key(enclosing[-1])]["seconds"] -= seconds
            totals[key(event)]["seconds"] += seconds
            totals[key(event)]["count"] += 1
            enclosing.append(event)
    return dict(sorted(totals.items(), key=lambda item: -item[1]["seconds"]))


def busy_and_gaps(lines: list[list[Event]]) -> tuple[float, list[float]]:
    """Seconds during which any operation ran, and the seconds of each gap."""
    busy, gaps, end = 0.0, [], None
    for event in sorted(event for events in lines for event in events):
        if end is None or event.start > end:
            gaps += [] if end is None else [(event.start - end) / 1e9]
            busy, end = busy + event.end - event.start, event.end
        elif event.end > end:
            busy, end = busy + event.end - end, event.end
    return busy / 1e9, gaps


def profile(examples: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data.npz"
        kind = epoch.write_data(data, examples)
        task = Task("lenet", str(data), variant="device")
        contestant = importlib.import_module("with_eqxshard").make(task)
        contestant.train()
        contestant.evaluate()
        with jax.profiler.trace(folder):
            start = time.perf_counter()
            contestant.train()
            train = time.perf_counter() - start
            contestant.evaluate()
            total = time.perf_counter() - start
        (path,) = Path(folder).rglob("*.xplane.pb")
        lines = list(device_lines(path))
    busy, gaps = busy_and_gaps(lines)
    return {
        "data": kind,
        "examples": examples,
        "seconds": {
            "total": total,
            "training": train,
            "evaluation": total - train,
            "device busy": busy,
            "device idle": total - busy,
            "idle between operations": sum(gaps),
            "longest gap": max(gaps, default=0.0),
        },
        "kinds": summed(lines, lambda event: event.kind),
        "operations": summed(lines, lambda event: f"{event.name}, {event.module}"),
    }


def show(title: str, results: dict[str, Any], top: int) -> None:
    """Print the tables."""
    console = Console(width=110)
    table = Table(title, "s", "share")
    for name, seconds in results["seconds"].items():
        share = seconds / results["seconds"]["total"]
        table.add_row(name, f"{seconds:.4f}", f"{share:.1%}")
    console.print(table)
    all_operations = sum(kind["seconds"] for kind in results["kinds"].values())
    for key in ("kinds", "operations"):
        table = Table(key, "s", "share of operations", "count", "us each")
        for name, kind in [*results[key].items()][:top]:
            seconds, count = kind["seconds"], kind["count"]
            table.add_row(
                name,
                f"{seconds:.4f}",
                f"{seconds / all_operations:.1%}",
                f"{count:.0f}",
                f"{seconds / count * 1e6:.1f}",
            )
        console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--examples", type=int, default=60_000)
    parser.add_argument("--top", type=int, default=20, help="rows to show")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="write profile.json here"
    )
    args = parser.parse_args()
    results = machine() | profile(args.examples)
    show("one epoch of LeNet", results, args.top)
    if args.output is not None:
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "profile.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
