"""The work of the steps of `recipes/fashion_mnist.py` on an H200, without one.

Each step is compiled by XLA's compiler for an H200, and its text is read: the kernels that
a step launches, the bytes that they move through the device's memory, and the least time
that it can take, by the peaks of arithmetic and of memory. `many` is counted per step. An
epoch is 235 steps of 256 images.

The baseline is the same model under a plain `jax.jit`, without a guard. "Channels last" is
the hand-written peer of `epoch.py`. Nothing is run, so the launches themselves, which take
some microseconds each, are not in the times.

It needs JAX's compiler for GPUs, which `nox -s bench` installs in a folder of its own.

    python benchmarks/gpu_compiled.py --output build/benchmarks
"""

import importlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from _side_by_side import Contest, Report, parser
from jax.experimental import topologies

import eqxshard
from eqxshard.compiled._hlo import Instruction, Module, parse_module
from eqxshard.planning import Target
from eqxshard.planning._backends import find_backend, install, wheels_folder
from eqxshard.planning._costs import FREE, Costs
from eqxshard.planning._timeline import Timeline, compute_seconds
from eqxshard.training._inputs import STACKED_BATCHES

sys.path.append(str(Path(__file__).parents[1] / "recipes"))
sys.path.append(str(Path(__file__).parent / "_peers"))
import fashion_mnist as recipe
from _peers._task import SIZES

with_jax = importlib.import_module("with_jax")

BATCH_SIZE, STEPS_OF_EPOCH, STACKED = 256, 235, 8
OPTIM = optax.adamw(5e-3, b2=0.98, weight_decay=0.01)  # The recipe's, at its highest rate.
TARGET = Target.named("h200")


@dataclass(frozen=True)
class Work:
    """The work of one step on a GPU.

    - `kernels`: the number of kernels, by kind.
    - `moved`: the bytes that kernels of a kind move through the device's memory.
    - `arithmetic`: the seconds of matrix products and convolutions alone, at their peak.
    - `seconds`: the least time of the whole step.
    """

    kernels: dict[str, float]
    moved: dict[str, float]
    arithmetic: float
    seconds: float


def read_work(compiled: Any, steps: int) -> Work:
    """The work of one step, from the text of a program that takes `steps` of them."""
    module = parse_module(compiled.as_text())
    costs = Costs(module)
    kernels, moved, flops = Counter[str](), Counter[str](), Counter[str]()
    for instruction, times in launches(module, module.entry):
        kind = kind_of(instruction)
        kernels[kind] += times
        moved[kind] += costs.bytes(instruction) * times
        for dtype, count in costs.flops(instruction).items():
            flops[dtype] += count * times
    return Work(
        {kind: count / steps for kind, count in kernels.items()},
        {kind: count / steps for kind, count in moved.items()},
        compute_seconds(flops, TARGET) / steps,
        Timeline(module, [], TARGET).length / steps,
    )


def launches(module: Module, computation: str) -> Iterator[tuple[Instruction, int]]:
    """Each instruction that launches a kernel, and how often it does."""
    for instruction in module.computations[computation]:
        if instruction.opcode in ("while", "call", "conditional"):
            times = module.trips(instruction) or 1
            for _, name in instruction.called():
                for inside, count in launches(module, name):
                    yield inside, count * times
        elif instruction.opcode not in FREE and not instruction.opcode.endswith("-done"):
            yield instruction, 1


def kind_of(instruction: Instruction) -> str:
    """The kind of a kernel: a library's function, or XLA's name for it."""
    target = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
    if target is not None:
        return target[1]
    if instruction.opcode != "fusion":
        return instruction.opcode
    # `loop_add_fusion.3` is of the kind `loop_add_fusion`.
    return re.sub(r"[.\d]+$", "", instruction.name)


def make_batch(shape: tuple[int, ...]) -> dict[str, Any]:
    image = jax.ShapeDtypeStruct((*shape, 28, 28), jnp.uint8)
    return {"image": image, "label": jax.ShapeDtypeStruct(shape, jnp.int32)}


def by_eqxshard(make_model: Callable[[Any], Any], mesh: Any, nonfinite: Any) -> Any:
    given: dict[str, Any] = {"mesh": mesh, "rule": eqxshard.replicate()}
    key = jax.random.key(0)
    state = eqxshard.abstract_state(make_model, OPTIM, key=key, **given)
    step = eqxshard.make_train_step(recipe.loss_fn, OPTIM, nonfinite=nonfinite, **given)
    return state, step


def single(make_model: Callable[[Any], Any], mesh: Any, nonfinite: Any) -> Work:
    state, step = by_eqxshard(make_model, mesh, nonfinite)
    return read_work(step.lower(state, make_batch((BATCH_SIZE,))).compile(), 1)


def many(make_model: Callable[[Any], Any], mesh: Any, nonfinite: Any) -> Work:
    state, step = by_eqxshard(make_model, mesh, nonfinite)
    call = step.machine.look_up(state, None, STACKED_BATCHES)
    lowered = call.lower(make_batch((STACKED, BATCH_SIZE)))
    return read_work(lowered.compile(), STACKED)


def by_jax(params: Any, losses: Callable[[Any, Any], Any], mesh: Any) -> Work:
    """A plain `jax.jit` of abstract parameters and `losses(params, batch)`."""
    sharding = jax.NamedSharding(mesh, jax.P())

    def step(params, opt_state, batch):
        def mean(params):
            return jnp.mean(losses(params, batch))

        loss, grads = jax.value_and_grad(mean)(params)
        updates, opt_state = OPTIM.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    jitted = jax.jit(step, donate_argnums=(0, 1), in_shardings=sharding)
    opt_state = jax.eval_shape(OPTIM.init, params)
    lowered = jitted.lower(params, opt_state, make_batch((BATCH_SIZE,)))
    return read_work(lowered.compile(), 1)


def same_model(make_model: Callable[[Any], Any], mesh: Any) -> Work:
    model = eqx.filter_eval_shape(make_model, jax.random.key(0))
    params, static = eqx.partition(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))

    def losses(params, batch):
        return recipe.loss_fn(eqx.combine(params, static), batch, None)

    return by_jax(params, losses, mesh)


def channels_last(name: str, mesh: Any) -> Work:
    params = jax.eval_shape(lambda: with_jax.init(jax.random.key(0), *SIZES[name]))

    def losses(params, batch):
        return with_jax.losses_and_logits(params, batch["image"], batch["label"])[0]

    return by_jax(params, losses, mesh)


def contestants(name: str, mesh: Any) -> dict[str, Callable[[], Work]]:
    """Contestants by name, the baseline first."""
    _, make_model, _ = recipe.MODELS[name]
    given = make_model, mesh
    found: dict[str, Callable[[], Work]] = {"jax.jit": partial(same_model, *given)}
    if name in SIZES:
        found["JAX by hand, channels last"] = partial(channels_last, name, mesh)
    for nonfinite in ("ignore", "skip"):
        said = f"nonfinite={nonfinite!r}"
        found[f"eqxshard, {said}"] = partial(single, *given, nonfinite)
        found[f"eqxshard, many({STACKED}), {said}"] = partial(many, *given, nonfinite)
    return found


def compare(name: str, works: dict[str, Work], rounds: int) -> list[Contest]:
    arithmetic = next(iter(works.values())).arithmetic * STEPS_OF_EPOCH * 1e3
    figures: dict[tuple[str, str], Callable[[Work], float]] = {
        (name, "kernels/step"): lambda work: sum(work.kernels.values()),
        (name, "MB moved/step"): lambda work: sum(work.moved.values()) / 1e6,
        (f"{name}, an epoch at least; arithmetic alone {arithmetic:.2g} ms", "ms"): (
            lambda work: work.seconds * STEPS_OF_EPOCH * 1e3
        ),
    }
    return [
        Contest(title, unit, {who: [figure(work)] * rounds for who, work in works.items()})
        for (title, unit), figure in figures.items()
    ]


def largest(work: Work) -> list[str]:
    """The kinds of kernels that move the most."""
    kinds = sorted(work.moved, key=lambda kind: -work.moved[kind])[:6]
    return [
        f"{work.kernels[kind]:g} x {kind}: {work.moved[kind] / 1e6:.1f} MB"
        for kind in kinds
    ]


def main() -> None:
    options = parser(__doc__, rounds=1)
    choices = [*recipe.MODELS]
    options.add_argument("--models", nargs="+", choices=choices, default=choices)
    args = options.parse_args()
    if find_backend(TARGET, None) != "gpu":
        print(f"The compiler for GPUs is not installed; run `{install('gpu')}`.")
        return
    sys.path.append(str(wheels_folder()))  # Behind the wheels beside JAX.
    # Otherwise the compiler would look for GPUs.
    jax.config.update("jax_platforms", "cpu")
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=TARGET.config, topology="1x1x1"
    )
    mesh = eqxshard.make_mesh(data=1, devices=topology.devices)
    contests, most = [], {}
    for name in args.models:
        makers = contestants(name, mesh)
        works = {who: make() for who, make in makers.items()}
        contests += compare(name, works, args.rounds)
        most[name] = {who: largest(work) for who, work in works.items()}
    setting = {"batch_size": BATCH_SIZE, "target": TARGET.kind, "largest": most}
    Report("gpu_compiled", contests, setting).show_and_write(args.output)


if __name__ == "__main__":
    main()
