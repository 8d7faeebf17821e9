"""Plans of published runs beside their published speeds: the back-test of "about".

Every run of `published.toml` is compiled for its devices and read, as `eqxshard.plan` does,
which takes half a minute each. A few efficiencies of GPUs are fitted on one half of the
runs; the other half, on which nothing is fitted, says how good they are. Two simpler models
are fitted and judged in the same way: one factor on all planned times, and one MFU.

It needs JAX's compiler for GPUs, which `nox -s bench` installs in a folder of its own.
With `--stored`, the steps are those of `published_steps.json`, and it takes seconds.
`--leave-one-out` also fits on all runs but one, for each.

    python benchmarks/backtest.py --output build/benchmarks
    python benchmarks/backtest.py --stored
"""

import dataclasses
import functools
import itertools
import json
import math
import pickle
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from _recorded import read_work as read_recorded
from _recorded import shorten
from _side_by_side import Contest, Report, parser
from rich.console import Console
from rich.table import Table

import eqxshard
from eqxshard.compiled._communication import Operation
from eqxshard.compiled._hlo import Instruction, Module, parse_module
from eqxshard.planning import Efficiency, Target
from eqxshard.planning._backends import find_devices
from eqxshard.planning._child import (
    Request,
    child_environment,
    compile_module,
    order_devices,
)
from eqxshard.planning._costs import Costs
from eqxshard.planning._efficiency import AT_PEAKS, GPUS, Work
from eqxshard.planning._lower import find_place, lower_ours
from eqxshard.planning._read import find_operations
from eqxshard.planning._timeline import Timeline, read_work
from eqxshard.sharding._spec import AXES

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
from gpt import Args, loss_fn, make_optimizer, make_rule
from gpt_model import GPT, SIZES, flops_per_token

HERE = Path(__file__).parent

#: What is fitted, and the values that are tried: together, then the last alone, and again.
FITTED = {
    "products": [n / 100 for n in range(60, 86)],
    "link": [n / 100 for n in range(30, 91, 4)],
    "exponent": [n / 20 for n in range(6, 21)],
}
STORED = HERE / "published_steps.json"


@dataclasses.dataclass(frozen=True)
class Repeated(Operation):
    """A collective that a program runs several times where the compiled step has one."""

    repeats: float

    @property
    def bytes(self) -> int:
        """Of all results on each device."""
        return round(self.repeats * super().bytes)


def repeat(operation: Operation, times: float) -> Repeated:
    fields = {x.name: getattr(operation, x.name) for x in dataclasses.fields(operation)}
    return Repeated(**fields, repeats=times)


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """A published run, as the table says it, and its step, as `shorten` writes it."""

    table: Mapping[str, Any]
    step: str

    @property
    def devices(self) -> int:
        return math.prod(self.table["mesh"].values())

    @property
    def target(self) -> Target:
        known = Target.named(self.table["device"])
        return dataclasses.replace(known, **self.table.get("target", {}))

    @property
    def tokens(self) -> int:
        """Of a device in a step."""
        return self.table["rows"] * make_shape(self.table).seq_len

    @property
    def published(self) -> float:
        """The seconds of a step."""
        return self.tokens / self.table["published"]

    @functools.cached_property
    def module(self) -> Module:
        return parse_module(self.step)

    @functools.cached_property
    def operations(self) -> list[Operation]:
        found = find_operations(self.module, self.devices, "gpu")
        times = self.table.get("tensor_sent", 1)
        sizes = {axis: self.table["mesh"].get(axis, 1) for axis in AXES}
        return [
            repeat(each, times) if each.axes(sizes) == ("tensor",) else each
            for each in found
        ]

    @functools.cached_property
    def work(self) -> Callable[[Instruction], Work]:
        return functools.cache(read_recorded)

    @functools.cache  # noqa: B019 (Fits that leave one out try the same.)
    def ratio(self, efficiency: Efficiency) -> float:
        """Planned over published seconds. Efficiencies are fitted at full power."""
        full = Target.named(self.table["device"]).power
        efficiency = dataclasses.replace(efficiency, power=full)
        made = Timeline(self.module, self.operations, self.target, efficiency, self.work)
        return made.length / self.published

    @property
    def arithmetic(self) -> float:
        """The seconds of the model's own arithmetic at the peak, over published ones."""
        flops = flops_per_token(make_shape(self.table)) * self.tokens
        return flops / self.target.flops["bfloat16"] / self.published


def make_shape(table: Mapping[str, Any]) -> Any:
    return dataclasses.replace(SIZES[table["size"]], **table.get("shape", {}))


def save_attention(mlp: int, primitive: Any, *arrays: Any, **params: Any) -> Any:
    """A policy of `jax.checkpoint`: the recipe's "dots", but those of the perceptron."""
    policies = jax.checkpoint_policies
    dots = policies.save_from_both_policies(
        policies.dots_with_no_batch_dims_saveable,
        policies.save_only_these_names("attention"),
    )
    of_perceptron = any(mlp in getattr(each, "shape", ()) for each in arrays)
    return not of_perceptron and dots(primitive, *arrays, **params)


def request_of(table: Mapping[str, Any]) -> Request:
    """What `eqxshard.plan` would compile."""
    run, shape = Run(table, ""), make_shape(table)
    remat: Any = table["remat"]
    if remat == "attention":
        remat = functools.partial(save_attention, shape.mlp)
    tokens = jax.ShapeDtypeStruct((table["rows"] * run.devices, shape.seq_len), jnp.int32)
    optimizer = Args(optimizer=table.get("optimizer", "adamw"))
    rule = make_rule(shape)
    if table.get("zero1", False):
        rule = eqxshard.combine(rule, eqxshard.zero1())
    return lower_ours(
        find_place(table["mesh"] or {"data": 1}, run.target, None, "gpu"),
        functools.partial(GPT, shape=shape, remat=remat),
        loss_fn,
        make_optimizer(optimizer, steps=1000),
        {"tokens": tokens, "targets": tokens},
        rule=rule,
        trainable=True,
        precision=eqxshard.Precision("bfloat16", table.get("params", "float32")),
        accumulate=table.get("accumulate", 1),
        nonfinite="skip",
        grad_norms=False,
        compiler_options=None,
    )


def compile_here(file: Path) -> str:
    """The step of a run, in the process that has the compiler."""
    request = pickle.loads(file.read_bytes())
    devices = find_devices(request.target, request.backend, request.devices)
    devices = order_devices(devices, request.sizes)
    compiled = compile_module(request.module, devices, request.compiler_options)
    module = parse_module(compiled.text)
    operations = find_operations(module, request.devices, "gpu")
    work = functools.partial(read_work, Costs(module), request.target)
    return shorten(module, operations, work)


def compile_all(tables: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The steps of all runs, each compiled in a process of its own."""
    for number, table in enumerate(tables):
        print(f"{number + 1} of {len(tables)}: {table['name']}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            request, file = request_of(table), Path(folder, "request")
            file.write_bytes(pickle.dumps(request))
            done = subprocess.run(
                [sys.executable, __file__, "--compile", file],
                env=child_environment(Path(folder), "gpu", request.devices),
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
        yield done.stdout


def fit(runs: Sequence[Run]) -> Efficiency:
    """The efficiency at which the logarithms of times are off by the least, on average."""

    def miss(efficiency: Efficiency) -> float:
        return statistics.fmean(abs(math.log(run.ratio(efficiency))) for run in runs)

    found = GPUS
    for names in (("products", "link"), ("exponent",)) * 2:
        tried = itertools.product(*(FITTED[name] for name in names))
        found = min(
            (dataclasses.replace(found, **dict(zip(names, each))) for each in tried),
            key=miss,
        )
    return found


def half(runs: Sequence[Run], which: str) -> list[Run]:
    return [run for run in runs if run.table["half"] == which]


def median_error(ratios: Sequence[float]) -> float:
    return statistics.median(abs(ratio - 1) for ratio in ratios)


def judge(runs: Sequence[Run], efficiency: Efficiency) -> dict[str, float]:
    """The median error on what is held out, of "about" and of the simpler models."""
    fitted, held = half(runs, "fit"), half(runs, "held")
    factor = statistics.median(run.ratio(AT_PEAKS) for run in fitted)
    mfu = statistics.median(run.arithmetic for run in fitted)
    return {
        "about": median_error([run.ratio(efficiency) for run in held]),
        "one factor": median_error([run.ratio(AT_PEAKS) / factor for run in held]),
        "one MFU": median_error([run.arithmetic / mfu for run in held]),
    }


def misordered(runs: Sequence[Run], efficiency: Efficiency) -> list[str]:
    """The pairs of meshes of one model whose order is not as published."""
    speeds = [
        (run.table["published"], run.table["published"] / run.ratio(efficiency), run)
        for run in runs
        if run.table["name"].startswith("KempnerForge")
    ]
    return [
        f"{a.table['name']} and {b.table['name']}"
        for (x, about_x, a), (y, about_y, b) in itertools.combinations(speeds, 2)
        if (x < y) != (about_x < about_y)
    ]


def print_table(runs: Sequence[Run], efficiency: Efficiency) -> None:
    table = Table("run", "half", title="tokens/s of a GPU", title_justify="left")
    for column in ("published", "at most", "about", "error of about"):
        table.add_column(column, justify="right")
    for run in runs:
        published, ratio = run.table["published"], run.ratio(efficiency)
        speeds = (published, published / run.ratio(AT_PEAKS), published / ratio)
        texts = [f"{speed:,.0f}" for speed in speeds]
        table.add_row(run.table["name"], run.table["half"], *texts, f"{1 / ratio - 1:+.0%}")
    Console(width=110).print(table)


def main() -> None:
    options = parser(__doc__, rounds=1)
    options.add_argument("--stored", action="store_true")
    options.add_argument("--leave-one-out", action="store_true")
    options.add_argument("--compile", type=Path, metavar="FILE", help="used by itself")
    args = options.parse_args()
    tables = tomllib.loads((HERE / "published.toml").read_text())["run"]
    if args.compile is not None:
        print(compile_here(args.compile))
        return
    steps = json.loads(STORED.read_text()) if args.stored else [*compile_all(tables)]
    runs = [Run(table, step) for table, step in zip(tables, steps, strict=True)]
    fitted = fit(half(runs, "fit"))
    print_table(runs, fitted)
    errors = judge(runs, fitted)
    found = {name: getattr(fitted, name) for name in FITTED}
    setting = {"fitted": found, "median errors, held out": errors}
    setting["not in order"] = {
        "held out": misordered(half(runs, "held"), fitted),
        "all": misordered(runs, fitted),
    }
    if args.leave_one_out:
        others = [(run, [x for x in runs if x is not run]) for run in runs]
        ratios = [run.ratio(fit(rest)) for run, rest in others]
        setting["median error, leaving one out"] = median_error(ratios)
    contests = [
        Contest(
            f"{title}: planned over published seconds",
            "ratio",
            {run.table["name"]: [run.ratio(fitted)] for run in half(runs, which)},
        )
        for which, title in (("held", "held out"), ("fit", "fitted"))
    ]
    Report("backtest", contests, setting).show_and_write(args.output)
    if args.output is not None:
        (args.output / STORED.name).write_text(json.dumps(steps, indent=1) + "\n")


if __name__ == "__main__":
    main()
