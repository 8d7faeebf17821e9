"""One turn of `first_call.py`: a process of its own, which has compiled nothing yet.

Prints its figures as JSON.

    python benchmarks/_first_call.py step by_eqxshard blocks 16 --fsdp 8
    python benchmarks/_first_call.py state with_equinox 120 --data 2 --fsdp 4
"""

import argparse
import json
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _frames import PACKAGE, frames_of
from jax.sharding import NamedSharding, PartitionSpec

import eqxshard
from eqxshard.sharding import batch_sharding

WIDTH, HEADS, TOKENS, ROWS = 64, 4, 16, 32
OPTIM, KEY = optax.adamw(1e-3), jax.random.key(0)
#: Smaller arrays are stored whole.
RULE = eqxshard.fsdp(min_size=256)

nn = eqx.nn


class Dense(eqx.Module):
    """A residual layer for vectors."""

    linear: nn.Linear

    def __init__(self, key: Any):
        self.linear = nn.Linear(WIDTH, WIDTH, key=key)

    def __call__(self, x):
        return x + jnp.tanh(self.linear(x))


class Block(eqx.Module):
    """A transformer block for sequences."""

    norms: list[nn.LayerNorm]
    attention: nn.MultiheadAttention
    up: nn.Linear
    down: nn.Linear

    def __init__(self, key: Any):
        first, second, third = jax.random.split(key, 3)
        self.norms = [nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)]
        self.attention = nn.MultiheadAttention(HEADS, WIDTH, key=first)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, key=second)
        self.down = nn.Linear(4 * WIDTH, WIDTH, key=third)

    def __call__(self, x):
        normed = jax.vmap(self.norms[0])(x)
        x = x + self.attention(normed, normed, normed)
        hidden = jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.norms[1])(x)))
        return x + jax.vmap(self.down)(hidden)


#: Layers by name, each with the shape of a batch.
LAYERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "dense": (Dense, (ROWS, WIDTH)),
    "blocks": (Block, (ROWS, TOKENS, WIDTH)),
}


class Unrolled(eqx.Module):
    """Layers in a list, applied one after the other."""

    layers: list[Any]

    def __init__(self, layer: Any, depth: int, key: Any):
        self.layers = [layer(each) for each in jax.random.split(key, depth)]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def loss_fn(model: Any, batch: Any, key: Any) -> Any:
    """One loss per example."""
    errors = jax.vmap(model)(batch["x"]) - batch["x"]
    return jnp.mean(errors.astype(jnp.float32) ** 2, axis=tuple(range(1, errors.ndim)))


class Watched:
    """The loss function, which counts at each call the frames of ours that it is under."""

    def __init__(self) -> None:
        self.frames: list[int] = []

    def __call__(self, model: Any, batch: Any, key: Any) -> Any:
        files = [frame.f_code.co_filename for frame, _ in traceback.walk_stack(None)]
        self.frames.append(sum(file.startswith(PACKAGE) for file in files))
        return loss_fn(model, batch, key)


def by_eqxshard(state: Any, batch: Any, precision: Any) -> dict[str, Any]:
    """The first step, and the functions of ours that a call goes through."""
    watched = Watched()
    step = eqxshard.make_train_step(watched, OPTIM, precision=precision)
    start = time.perf_counter()
    state, metrics = step(state, batch)
    losses = [float(metrics["loss"])]
    seconds = time.perf_counter() - start
    for _ in range(2):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    entered, nested = frames_of(lambda: step(state, batch))
    frames = {
        "nested between a first call and the loss": max(watched.frames),
        "traces of the loss": len(watched.frames),
        "nested in a warm call": nested,
        "entered in a warm call": entered,
    }
    return {"seconds": seconds, "losses": losses, "frames": frames}


def by_hand(state: Any, batch: Any, precision: Any, guard: bool = False) -> dict[str, Any]:
    """The first step of `jax.jit`, on the same arrays under the same shardings.

    Optax's guard keeps the old values if an update of a parameter is not finite.
    """
    params, static = eqx.partition(state.model, eqx.is_array)
    opt_state, optim = state.opt_state, OPTIM
    whole = NamedSharding(batch["x"].sharding.mesh, PartitionSpec())
    if guard:
        optim = optax.apply_if_finite(OPTIM, max_consecutive_errors=3)
        counted: Any = optim.init(())
        counts = jax.device_put(counted._replace(inner_state=None), whole)
        opt_state = counts._replace(inner_state=opt_state)
    stored, opt_stored = jax.tree.map(lambda x: x.sharding, (params, opt_state))

    def mean_loss(params: Any, batch: Any) -> Any:
        if precision is not None:
            params, batch = jax.tree.map(
                lambda x: x.astype(precision.compute), (params, batch)
            )
        params = jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, whole), params)
        return jnp.mean(loss_fn(eqx.combine(params, static), batch, None))

    @partial(jax.jit, donate_argnums=(0, 1), out_shardings=(stored, opt_stored, whole))
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(mean_loss)(params, batch)
        grads = jax.tree.map(jax.lax.with_sharding_constraint, grads, stored)
        updates, opt_state = optim.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    start = time.perf_counter()
    params, opt_state, loss = step(params, opt_state, batch)
    losses = [float(loss)]
    seconds = time.perf_counter() - start
    for _ in range(2):
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
    return {"seconds": seconds, "losses": losses}


STEPS: dict[str, Callable[[Any, Any, Any], dict[str, Any]]] = {
    "by_hand": by_hand,
    "by_hand_guarded": partial(by_hand, guard=True),
    "by_eqxshard": by_eqxshard,
}


def first_step(args: argparse.Namespace) -> dict[str, Any]:
    mesh = eqxshard.make_mesh(data=args.data, fsdp=args.fsdp)
    precision = eqxshard.Precision("bfloat16") if args.bfloat16 else None
    layer, shape = LAYERS[args.model]
    make = partial(Unrolled, layer, args.layers)
    state = eqxshard.init_state(
        make, OPTIM, key=KEY, mesh=mesh, rule=RULE, precision=precision
    )
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    batch = jax.device_put({"x": x}, batch_sharding(mesh))
    jax.block_until_ready((eqx.filter(state, eqx.is_array), batch))
    turn = STEPS[args.contestant]
    return turn(state, batch, precision)


def make_blocks(count: int, key: Any) -> Any:
    def block(key: Any) -> Any:
        first, second = jax.random.split(key)
        up, down = nn.Linear(48, 96, key=first), nn.Linear(96, 48, key=second)
        return [up, nn.LayerNorm(96), down]

    return [block(each) for each in jax.random.split(key, count)]


def with_equinox(make: Callable[[Any], Any], key: Any) -> Any:
    """A model and its optimizer's state, made eagerly on one device."""
    model = make(key)
    return model, OPTIM.init(eqx.filter(model, eqx.is_inexact_array))


def first_states(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds to make the first state of a process, and the second one."""
    if args.contestant == "with_equinox":
        build = with_equinox
    else:
        mesh = eqxshard.make_mesh(data=args.data, fsdp=args.fsdp)
        build = partial(eqxshard.init_state, optim=OPTIM, mesh=mesh, rule=RULE)
    seconds = []
    for seed in range(2):
        key = jax.block_until_ready(jax.random.key(seed))
        start = time.perf_counter()
        state = build(partial(make_blocks, args.layers), key=key)
        jax.block_until_ready(eqx.filter(state, eqx.is_array))
        seconds.append(time.perf_counter() - start)
    return {"seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    tasks = parser.add_subparsers(required=True)
    step, state = tasks.add_parser("step"), tasks.add_parser("state")
    step.set_defaults(task=first_step)
    step.add_argument("contestant", choices=STEPS)
    step.add_argument("model", choices=LAYERS)
    step.add_argument("--bfloat16", action="store_true")
    state.set_defaults(task=first_states)
    state.add_argument("contestant", choices=["with_equinox", "with_eqxshard"])
    for task in (step, state):
        task.add_argument("layers", type=int)
        task.add_argument("--data", type=int, default=1)
        task.add_argument("--fsdp", type=int, default=1)
    args = parser.parse_args()
    print(json.dumps(args.task(args)))


if __name__ == "__main__":
    main()
