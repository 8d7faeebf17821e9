"""Compare XLA's options for the steps of large models, by plans: nothing is run.

Each step is compiled for GPUs that are not there, once with each set of options, and its
schedule is read as plans read it: the seconds that it waits for links, the seconds of the
whole step, and the peak of memory. An option that makes one of them worse may not help.

It needs JAX's compiler for GPUs, as plans do.

    python benchmarks/_compiler_options.py
    python benchmarks/_compiler_options.py --cases "8b fsdp" --options default overlap
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import eqxshard
from eqxshard.planning import Target
from eqxshard.planning._backends import find_backend, install

# In front of this folder, which has a gpt.py as well.
sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
import gpt
from gpt_model import GPT, SIZES, Remat, Shape

_IS_NEW = jax.__version_info__ >= (0, 11)
_PIPELINED = "xla_gpu_pipeline_{}" if _IS_NEW else "xla_gpu_enable_pipelined_{}"
_KINDS = ("all_gather", "reduce_scatter", "all_reduce")

OVERLAP = {"xla_gpu_experimental_parallel_collective_overlap_limit": 4}
#: The effort level O1, which JAX 0.10 takes as a number only.
O1 = {"optimization_level": 19}
PIPELINED = dict.fromkeys(
    map(_PIPELINED.format, _KINDS), "COLLECTIVE_PIPELINING_MODE_ON" if _IS_NEW else True
)
#: Sets of compiler options by name, the default first.
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "overlap": OVERLAP,
    "O1": O1,
    "O1, overlap": O1 | OVERLAP,
    "pipelined": PIPELINED,
    "pipelined, overlap": PIPELINED | OVERLAP,
    "double buffering": {"xla_gpu_enable_while_loop_double_buffering": True},
}


@dataclass(frozen=True)
class Case:
    """A step of a large model on a mesh.

    - `make_model`, `loss_fn`, `optim`, `rule`: as for `eqxshard.plan`.
    - `batch`: the batch of all devices.
    - `mesh`: the sizes of its axes.
    - `target`: as for `eqxshard.plan`.
    """

    make_model: Callable[[Any], Any]
    loss_fn: Callable[..., Any]
    optim: Any
    rule: Any
    batch: Any
    mesh: Mapping[str, int]
    target: str = "h200"


def gpt_case(
    shape: Shape, remat: Remat, rows: int, target: str = "h200", **mesh: int
) -> Case:
    tokens = jax.ShapeDtypeStruct((rows, shape.seq_len), jnp.int32)
    return Case(
        partial(GPT, shape=shape, remat=remat),
        gpt.loss_fn,
        gpt.make_optimizer(gpt.Args(), 1000),
        gpt.make_rule(shape),
        {"tokens": tokens, "targets": tokens},
        mesh,
        target,
    )


_EXPERTS = Shape(
    layers=16,
    heads=16,
    kv_heads=16,
    embed=2048,
    mlp=4096,
    seq_len=4096,
    vocab_size=50_304,
    tied=False,
    experts=16,
)
CASES: dict[str, Callable[[], Case]] = {
    "8b fsdp": partial(gpt_case, SIZES["8b"], "full", 16, fsdp=8),
    "8b dots fsdp": partial(gpt_case, SIZES["8b"], "dots", 16, fsdp=8),
    # Where memory is short.
    "8b dots data x fsdp, H100": partial(
        gpt_case, SIZES["8b"], "dots", 128, "h100", data=8, fsdp=8
    ),
    "8b data x fsdp": partial(gpt_case, SIZES["8b"], "full", 128, data=8, fsdp=8),
    "70b data x fsdp x tensor": partial(
        gpt_case, SIZES["70b"], "full", 128, data=8, fsdp=8, tensor=8
    ),
    "124m data": partial(gpt_case, SIZES["124m"], "dots", 128, data=8),
    "experts": partial(gpt_case, _EXPERTS, "full", 32, data=2, expert=8),
}


def read(case: Case, options: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a step; none if it cannot be compiled."""
    try:
        plan = eqxshard.plan(
            case.make_model,
            case.loss_fn,
            case.optim,
            case.batch,
            mesh_shape=case.mesh,
            rule=case.rule,
            precision=eqxshard.Precision("bfloat16"),
            target=case.target,
            backend="gpu",
            compiler_options=options,
        )
    except (RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return {}
    assert plan.time is not None and plan.time.waiting is not None
    return {
        "waiting": sum(plan.time.waiting.values()),
        "step": plan.time.step,
        "peak": plan.memory.peak,
        "flops": sum(plan.flops.values()),
    }


def show(found: dict[str, dict[str, dict[str, float]]]) -> Table:
    names = ("waits, ms", "step, ms", "peak, GB", "TFLOP")
    table = Table("case", "options", *names, title=f"jax {jax.__version__}")
    for case, by_options in found.items():
        for options, each in by_options.items():
            if not each:
                table.add_row(case, options, "XLA fails")
                continue
            waits, step = 1e3 * each["waiting"], 1e3 * each["step"]
            peak, flops = each["peak"] / 1e9, each["flops"] / 1e12
            figures = (f"{waits:,.1f}", f"{step:,.1f}", f"{peak:,.2f}", f"{flops:,.1f}")
            table.add_row(case, options, *figures)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Compare XLA's options for the steps of large models, by plans."
    )
    parser.add_argument("--cases", nargs="+", choices=[*CASES], default=[*CASES])
    parser.add_argument("--options", nargs="+", choices=[*OPTIONS], default=[*OPTIONS])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    if find_backend(Target.named("h200"), None) != "gpu":
        print(f"The compiler for GPUs is not installed; run `{install('gpu')}`.")
        return
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name in args.cases:
        case = CASES[name]()
        for options in args.options:
            found.setdefault(name, {})[options] = read(case, OPTIONS[options])
            print(name, options, found[name][options], file=sys.stderr, flush=True)
            if args.json is not None:
                args.json.write_text(json.dumps(found, indent=1) + "\n")
    Console(width=110).print(show(found))


if __name__ == "__main__":
    main()
