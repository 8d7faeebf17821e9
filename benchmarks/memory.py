"""Bytes on a device that a compiled step needs, beside what one counts by hand.

The model is a stack of square layers without biases, the optimizer Adam, so that all can
be counted: parameters, their two moments, the batch, and of what comes and goes the most
that lives at one time, which is when the gradient of layer i is made: the outputs of the
layers up to it, the gradients of those after it, and the gradient of the activation that
goes in and comes out. What a compiled step needs is what XLA says of it: arguments,
temporaries, and results that are not in donated arguments' place. Nothing runs.

    python benchmarks/memory.py --output build/benchmarks
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from _side_by_side import Contest, Report, parser

import eqxshard

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
    """Layers one after the other."""

    layers: list[Layer]

    def __init__(self, depth: int, width: int, key: Any):
        self.layers = [Layer(width, k) for k in jax.random.split(key, depth)]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Scanned(eqx.Module):
    """The same in a scan: what goes between layers is kept, the rest computed twice."""

    layers: Layer

    def __init__(self, depth: int, width: int, key: Any):
        keys = jax.random.split(key, depth)
        self.layers = eqx.filter_vmap(lambda key: Layer(width, key))(keys)

    def __call__(self, x):
        return eqxshard.scan_layers(self.layers, x)


@dataclass(frozen=True)
class Sizes:
    """What is counted, in bytes on one device."""

    depth: int
    layer: int
    activation: int

    @property
    def state(self) -> int:
        """Parameters, and Adam's two moments."""
        return 3 * self.depth * self.layer

    @property
    def batch(self) -> int:
        """Inputs and targets."""
        return 2 * self.activation

    def backward(self, parts: int = 1) -> int:
        """The most that lives at one time while gradients are made, in parts of a batch."""
        activation = self.activation // parts
        most = max(
            i * activation + (self.depth - i) * self.layer for i in range(self.depth + 1)
        )
        sums = self.depth * self.layer if parts > 1 else 0
        return most + 2 * activation + sums


def losses(model: Any, batch: Any, key: Any) -> Any:
    return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2, axis=-1)


def peak(compiled: Any) -> int:
    """Bytes on a device: results that lie in the place of arguments count once."""
    stats = compiled.memory_analysis()
    return (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.temp_size_in_bytes
    )


def by_eqxshard(
    make: Callable[[Any], Any], batch: Any, mesh: Any, rule: Any, **options: Any
) -> int:
    key = jax.random.key(0)
    state = eqxshard.abstract_state(make, OPTIM, key=key, mesh=mesh, rule=rule)
    step = eqxshard.make_train_step(losses, OPTIM, mesh=mesh, rule=rule, **options)
    return peak(step.lower(state, batch).compile())


def kept(make: Callable[[Any], Any], mesh: Any, rule: Any) -> int:
    """Bytes of a state in a device's own memory, between steps."""
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

    def plain(key):
        return Plain(depth, width, key)

    def scanned(key):
        return Scanned(depth, width, key)

    def mesh(count: int, **axes: Any) -> Any:
        return eqxshard.make_mesh(devices=jax.devices()[:count], **axes)

    one, whole, fsdp = mesh(1), eqxshard.replicate(), eqxshard.fsdp(min_size=1)
    here, split = sizes(), sizes(8)
    bare = here.state + here.batch
    # What a scan's gradients are written into is there from its start.
    stacked = depth * (here.layer + here.activation) + 3 * here.activation
    cases: dict[str, tuple[int, dict[str, Callable[[], int]]]] = {
        "one device": (
            bare + here.backward(),
            {
                "hand-written jax.jit": lambda: by_jax(plain, batch, True),
                "eqxshard, nonfinite='ignore'": lambda: by_eqxshard(
                    plain, batch, one, whole, nonfinite="ignore"
                ),
                "eqxshard, nonfinite='skip'": lambda: by_eqxshard(plain, batch, one, whole),
            },
        ),
        "one device, nothing donated": (
            bare + here.state + here.backward(),
            {"hand-written jax.jit": lambda: by_jax(plain, batch, False)},
        ),
        "one device, the batch in 4 parts": (
            bare + here.backward(parts=4),
            {"eqxshard": lambda: by_eqxshard(plain, batch, one, whole, accumulate=4)},
        ),
        "one device, scan_layers, which computes again": (
            bare + stacked,
            {"eqxshard": lambda: by_eqxshard(scanned, batch, one, whole)},
        ),
        "each of 8 devices, data=8": (
            here.state + split.batch + split.backward(),
            {"eqxshard": lambda: by_eqxshard(plain, batch, mesh(8), whole)},
        ),
        "each of 8 devices, fsdp=8": (
            here.state // 8 + split.batch + split.backward(),
            {"eqxshard": lambda: by_eqxshard(plain, batch, mesh(8, data=1, fsdp=8), fsdp)},
        ),
        "one device, between steps": (
            here.state,
            {"eqxshard": lambda: kept(plain, one, whole)},
        ),
        "one device, between steps, with the optimizer's state on the host": (
            here.state // 3,
            {
                "eqxshard, offload(replicate())": lambda: kept(
                    plain, one, eqxshard.offload(whole)
                )
            },
        ),
    }
    contests = []
    for title, (count, figures) in cases.items():
        values = {"counted by hand": [count / MIB] * args.rounds}
        values |= {name: [find() / MIB] * args.rounds for name, find in figures.items()}
        contests.append(Contest(title, "MiB", values))
    setting = {"depth": depth, "width": width, "batch_size": rows}
    Report("memory", contests, setting).show_and_write(args.output)


if __name__ == "__main__":
    main()
