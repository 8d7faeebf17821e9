"""Bytes of device memory that a compiled step needs, compared with a count by hand.

The model is a stack of square layers without biases, and the optimizer is Adam, so the
memory can be counted: parameters, Adam's two moments, the batch, and the peak of temporary
arrays. That peak is reached in the backward pass of some layer i: the outputs of the layers
up to i, the parameter gradients of the layers after it, and the gradients of its input and
output. The figures for compiled steps come from XLA's memory analysis: arguments,
temporaries, and results that do not reuse donated arguments. Nothing is run. Where JAX's
compiler for GPUs is installed, which `nox -s bench` does, the same steps are compiled for
an H200, too.

For each step on CPUs, the instruction with the largest result is printed: most often it
explains the memory that the compiled step needs beyond the count.

    python benchmarks/memory.py --output build/benchmarks
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from _side_by_side import Contest, Report, parser

import eqxshard
from eqxshard.compiled._hlo import Instruction, parse_module
from eqxshard.planning import Target
from eqxshard.planning._backends import find_backend

OPTIM = optax.adam(1e-3)
MIB = 2**20


class Layer(eqx.Module):
    """A square matrix and an activation."""

    linear: eqx.nn.Linear

    def __init__(self, width: int, key: Any):
        self.linear = eqx.nn.Linear(width, width, use_bias=False, key=key)

    def __call__(self, x):
        return jnp.tanh(self.linear(x))


class Plain(eqx.Module):
    """Layers in a Python loop."""

    layers: list[Layer]

    def __init__(self, depth: int, width: int, key: Any):
        self.layers = [Layer(width, k) for k in jax.random.split(key, depth)]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Scanned(eqx.Module):
    """The same layers in a scan, with remat: only the inputs of layers are saved."""

    layers: Layer

    def __init__(self, depth: int, width: int, key: Any):
        keys = jax.random.split(key, depth)
        self.layers = eqx.filter_vmap(lambda key: Layer(width, key))(keys)

    def __call__(self, x):
        return eqxshard.scan_layers(self.layers, x)


@dataclass(frozen=True)
class Sizes:
    """The count by hand, in bytes on one device."""

    depth: int
    layer: int
    activation: int

    @property
    def state(self) -> int:
        """Parameters and Adam's two moments."""
        return 3 * self.depth * self.layer

    @property
    def batch(self) -> int:
        """Inputs and targets."""
        return 2 * self.activation

    def backward(self, microbatches: int = 1) -> int:
        """The peak of temporary arrays while gradients are computed."""
        activation = self.activation // microbatches
        peak = max(
            i * activation + (self.depth - i) * self.layer for i in range(self.depth + 1)
        )
        accumulated = self.depth * self.layer if microbatches > 1 else 0
        return peak + 2 * activation + accumulated


def losses(model: Any, batch: Any, key: Any) -> Any:
    return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2, axis=-1)


def peak(compiled: Any) -> int:
    """Bytes on a device; results that reuse donated arguments count once."""
    stats = compiled.memory_analysis()
    return (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.temp_size_in_bytes
    )


@dataclass(frozen=True)
class Case:
    """A step of eqxshard: `options` are those of `make_train_step`."""

    make: Callable[[Any], Any]
    batch: Any
    axes: dict[str, int]
    rule: Any
    options: dict[str, Any]

    def on_cpus(self) -> int:
        count, key = math.prod(self.axes.values()), jax.random.key(0)
        axes: dict[str, Any] = dict(self.axes)
        mesh = eqxshard.make_mesh(devices=jax.devices()[:count], **axes)
        given: dict[str, Any] = {"mesh": mesh, "rule": self.rule}
        state = eqxshard.abstract_state(self.make, OPTIM, key=key, **given)
        step = eqxshard.make_train_step(losses, OPTIM, **given, **self.options)
        compiled = step.lower(state, self.batch).compile()
        print(f"{self.axes}, {self.options}: {largest(compiled)}")
        return peak(compiled)

    def on_gpus(self) -> int:
        plan = eqxshard.plan(
            self.make,
            losses,
            OPTIM,
            self.batch,
            mesh_shape=self.axes,
            rule=self.rule,
            target="h200",
            backend="gpu",
            **self.options,
        )
        return plan.memory.peak

    def measures(self, name: str = "eqxshard") -> dict[str, Callable[[], int]]:
        found = {name: self.on_cpus}
        if find_backend(Target.named("h200"), None) == "gpu":
            found[f"{name}, compiled for an H200"] = self.on_gpus
        return found


def largest(compiled: Any) -> str:
    """The instruction with the largest result, of those that allocate one."""
    views = {"parameter", "tuple", "get-tuple-element", "bitcast", "while", "conditional"}

    def size(instruction: Instruction) -> int:
        return sum(shape.bytes for shape in instruction.shapes)

    module = parse_module(compiled.as_text())
    # Inside of a fusion, values are not stored.
    fused = {
        name
        for x in module.instructions()
        if x.opcode == "fusion"
        for _, name in x.called()
    }
    stored = [
        x
        for x in module.instructions()
        if x.opcode not in views and x.computation not in fused
    ]
    found = max(stored, key=size)
    shapes = ", ".join(map(str, found.shapes))
    return f"%{found.name} = ({shapes}) {found.opcode}, {size(found) / MIB:.1f} MiB"


def state_bytes(make: Callable[[Any], Any], mesh: Any, rule: Any) -> int:
    """Bytes of a state in a device's own memory between steps."""
    key = jax.random.key(0)
    state = eqxshard.abstract_state(make, OPTIM, key=key, mesh=mesh, rule=rule)
    arrays = jax.tree.leaves((state.model, state.opt_state))
    return sum(
        leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape))
        for leaf in arrays
        if isinstance(leaf, jax.ShapeDtypeStruct)
        and leaf.sharding.memory_kind != "pinned_host"
    )


def by_jax(make: Callable[[Any], Any], batch: Any, donate: bool) -> int:
    model = eqx.filter_eval_shape(make, jax.random.key(0))
    params, static = eqx.partition(
        model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)
    )
    opt_state = jax.eval_shape(OPTIM.init, params)

    def step(params, opt_state, batch):
        def mean(params):
            return jnp.mean(losses(eqx.combine(params, static), batch, None))

        loss, grads = jax.value_and_grad(mean)(params)
        updates, opt_state = OPTIM.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    jitted = jax.jit(step, donate_argnums=(0, 1) if donate else ())
    return peak(jitted.lower(params, opt_state, batch).compile())


def main() -> None:
    options = parser(__doc__, rounds=1)
    options.add_argument("--depth", type=int, default=8)
    options.add_argument("--width", type=int, default=1024)
    options.add_argument("--batch-size", type=int, default=4096)
    args = options.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    depth, width, rows = args.depth, args.width, args.batch_size
    batch = {name: jax.ShapeDtypeStruct((rows, width), jnp.float32) for name in "xy"}

    def sizes(devices: int = 1) -> Sizes:
        return Sizes(depth, 4 * width * width, 4 * rows * width // devices)

    plain, scanned = partial(Plain, depth, width), partial(Scanned, depth, width)
    replicate, fsdp = eqxshard.replicate(), eqxshard.fsdp(min_size=1)
    one = eqxshard.make_mesh(data=1, devices=jax.devices()[:1])

    def case(axes: dict[str, int], rule: Any = replicate, **options: Any) -> Case:
        return Case(plain, batch, axes, rule, options)

    single, of_8 = sizes(), sizes(8)
    arguments = single.state + single.batch
    # A scan allocates the stacked gradients of all layers at its start.
    stacked = depth * (single.layer + single.activation) + 3 * single.activation
    cases: dict[str, tuple[int, dict[str, Callable[[], int]]]] = {
        "one device": (
            arguments + single.backward(),
            {
                "hand-written jax.jit": lambda: by_jax(plain, batch, True),
                **case({"data": 1}, nonfinite="ignore").measures(
                    "eqxshard, nonfinite='ignore'"
                ),
                **case({"data": 1}).measures("eqxshard, nonfinite='skip'"),
            },
        ),
        "one device, nothing donated": (
            arguments + single.state + single.backward(),
            {"hand-written jax.jit": lambda: by_jax(plain, batch, False)},
        ),
        "one device, the batch in 4 parts": (
            arguments + single.backward(microbatches=4),
            case({"data": 1}, accumulate=4).measures(),
        ),
        "one device, scan_layers, which computes again": (
            arguments + stacked,
            Case(scanned, batch, {"data": 1}, replicate, {}).measures(),
        ),
        "each of 8 devices, data=8": (
            single.state + of_8.batch + of_8.backward(),
            case({"data": 8}).measures(),
        ),
        "each of 8 devices, fsdp=8": (
            single.state // 8 + of_8.batch + of_8.backward(),
            case({"data": 1, "fsdp": 8}, fsdp).measures(),
        ),
        "each of 8 devices, fsdp=8, scan_layers": (
            # Only the weights and the gradients of one layer are whole.
            single.state // 8
            + of_8.batch
            + depth * (single.layer // 8 + of_8.activation)
            + 3 * of_8.activation
            + 2 * single.layer,
            Case(scanned, batch, {"data": 1, "fsdp": 8}, fsdp, {}).measures(),
        ),
        "one device, between steps": (
            single.state,
            {"eqxshard": lambda: state_bytes(plain, one, replicate)},
        ),
        "one device, between steps, with the optimizer's state on the host": (
            single.state // 3,
            {
                "eqxshard, offload(replicate())": lambda: state_bytes(
                    plain, one, eqxshard.offload(replicate)
                )
            },
        ),
    }
    contests = []
    for title, (counted, contestants) in cases.items():
        values = {"counted by hand": [counted / MIB] * args.rounds}
        values |= {
            name: [measure() / MIB] * args.rounds for name, measure in contestants.items()
        }
        contests.append(Contest(title, "MiB", values))
    setting = {"depth": depth, "width": width, "batch_size": rows}
    Report("memory", contests, setting).show_and_write(args.output)


if __name__ == "__main__":
    main()
