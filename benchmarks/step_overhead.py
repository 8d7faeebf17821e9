"""Microseconds per training step of a model so small that only the overhead shows.

The same step (an MLP of width 16, mean squared error, Adam) as `train_step`, with and
without its guard against values that are not finite; under `equinox.filter_jit`; and
under a `jax.jit` whose arrays were flattened by hand, which is the measure: there is
nothing to a call but JAX's own dispatch, and it guards against nothing. Contestants take
turns, round by round, so that whatever else the machine does meets them alike.

    python benchmarks/step_overhead.py --depths 4 48 --json step_overhead.json
"""

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from rich.console import Console
from rich.table import Table

import eqxshard

WIDTH, BATCH_SIZE, TOGETHER = 16, 32, 64
OPTIM = optax.adam(1e-3)

#: Takes at least so many steps, waits for the last, and returns how many it took.
Contestant = Callable[[int], int]


def losses(model: Any, batch: Any, key: Any) -> Any:
    return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2, axis=-1)


def update(model: Any, opt_state: Any, batch: Any) -> Any:
    """The step, in plain Equinox."""

    def mean(params, static):
        return jnp.mean(losses(eqx.combine(params, static), batch, None))

    params, static = eqx.partition(model, eqx.is_inexact_array)
    loss, grads = jax.value_and_grad(mean)(params, static)
    updates, opt_state = OPTIM.update(grads, opt_state, params)
    return eqx.combine(eqx.apply_updates(params, updates), static), opt_state, loss


def by_train_step(make_model: Any, batch: Any, mesh: Any, nonfinite: Any) -> Contestant:
    state, train_step = start(make_model, mesh, nonfinite)

    def run(steps: int) -> int:
        nonlocal state
        metrics = None
        for _ in range(steps):
            state, metrics = train_step(state, batch)
        jax.block_until_ready(metrics)
        return steps

    return run


def by_many(make_model: Any, batch: Any, mesh: Any, nonfinite: Any) -> Contestant:
    state, train_step = start(make_model, mesh, nonfinite)
    batches = jax.tree.map(lambda x: jnp.stack([x] * TOGETHER), batch)
    batches = eqxshard.filter_shard(batches, eqxshard.batch_sharding(mesh, stacked=True))

    def run(steps: int) -> int:
        nonlocal state
        metrics, dispatches = None, -(-steps // TOGETHER)
        for _ in range(dispatches):
            state, metrics = train_step.many(state, batches)
        jax.block_until_ready(metrics)
        return dispatches * TOGETHER

    return run


def start(make_model: Any, mesh: Any, nonfinite: Any) -> tuple[Any, eqxshard.TrainStep]:
    rule, key = eqxshard.replicate(), jax.random.key(0)
    state = eqxshard.init_state(make_model, OPTIM, key=key, mesh=mesh, rule=rule)
    return state, eqxshard.make_train_step(
        losses, OPTIM, mesh=mesh, rule=rule, nonfinite=nonfinite
    )


def by_equinox(make_model: Any, batch: Any, mesh: Any) -> Contestant:
    model = make_model(jax.random.key(0))
    opt_state = OPTIM.init(eqx.filter(model, eqx.is_inexact_array))
    model, opt_state = eqxshard.filter_shard(
        (model, opt_state), jax.NamedSharding(mesh, jax.P())
    )

    @eqx.filter_jit(donate="all-except-first")
    def step(batch, model, opt_state):
        return update(model, opt_state, batch)

    def run(steps: int) -> int:
        nonlocal model, opt_state
        loss = None
        for _ in range(steps):
            model, opt_state, loss = step(batch, model, opt_state)
        jax.block_until_ready(loss)
        return steps

    return run


def by_hand(make_model: Any, batch: Any, mesh: Any) -> Contestant:
    model = make_model(jax.random.key(0))
    opt_state = OPTIM.init(eqx.filter(model, eqx.is_inexact_array))
    arrays, static = eqx.partition((model, opt_state), eqx.is_array)
    flat, treedef = jax.tree.flatten(arrays)
    flat = jax.device_put(flat, jax.NamedSharding(mesh, jax.P()))

    def step(flat, batch):
        model, opt_state = eqx.combine(jax.tree.unflatten(treedef, flat), static)
        model, opt_state, loss = update(model, opt_state, batch)
        return jax.tree.leaves(eqx.filter((model, opt_state), eqx.is_array)), loss

    jitted = jax.jit(step, donate_argnums=0)

    def run(steps: int) -> int:
        nonlocal flat
        loss = None
        for _ in range(steps):
            flat, loss = jitted(flat, batch)
        jax.block_until_ready(loss)
        return steps

    return run


def contestants(depth: int, mesh: Any) -> dict[str, Contestant]:
    """By name; the measure first."""

    def make_model(key):
        return eqx.nn.MLP(WIDTH, WIDTH, WIDTH, depth - 1, key=key)

    x, y = jax.random.normal(jax.random.key(1), (2, BATCH_SIZE, WIDTH))
    batch = eqxshard.filter_shard({"x": x, "y": y}, eqxshard.batch_sharding(mesh))
    given = make_model, batch, mesh
    return {
        "jax.jit, flattened by hand": by_hand(*given),
        "train_step, nonfinite='ignore'": by_train_step(*given, "ignore"),
        "train_step, nonfinite='skip'": by_train_step(*given, "skip"),
        f"train_step.many({TOGETHER}), nonfinite='ignore'": by_many(*given, "ignore"),
        f"train_step.many({TOGETHER}), nonfinite='skip'": by_many(*given, "skip"),
        "equinox.filter_jit": by_equinox(*given),
    }


def microseconds(run: Contestant, seconds: float) -> float:
    """Per step, over about so many seconds."""
    steps = 16
    while True:
        start = time.perf_counter()
        taken = run(steps)
        elapsed = time.perf_counter() - start
        if elapsed >= seconds:
            return elapsed / taken * 1e6
        steps *= 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Microseconds per training step of a tiny model, side by side."
    )
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 48], metavar="N")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--seconds", type=float, default=0.05, help="of each turn")
    parser.add_argument("--json", metavar="FILE", help="where to write the figures")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.devices)
    mesh = eqxshard.make_mesh(devices=jax.devices()[: args.devices])

    console, results = Console(width=100), []
    for depth in args.depths:
        times: dict[str, list[float]] = {}
        runs = contestants(depth, mesh)
        for _ in range(args.rounds + 1):
            for name, run in runs.items():
                times.setdefault(name, []).append(microseconds(run, args.seconds))
        times = {name: figures[1:] for name, figures in times.items()}  # without compiling
        measure = next(iter(times.values()))
        table = Table("", "us/step", "min to max", "ratio", title=f"depth {depth}")
        for name, figures in times.items():
            ratio = statistics.median(mine / bare for mine, bare in zip(figures, measure))
            results.append({"depth": depth, "name": name, "us": figures, "ratio": ratio})
            table.add_row(
                name,
                f"{statistics.median(figures):.1f}",
                f"{min(figures):.1f} to {max(figures):.1f}",
                f"{ratio:.2f}",
            )
        console.print(table)
    packages = ("eqxshard", "jax", "equinox", "optax")
    setting = {
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "python": platform.python_version(),
        "platform": jax.default_backend(),
        "devices": args.devices,
        "cpus": os.cpu_count(),
        "width": WIDTH,
        "batch_size": BATCH_SIZE,
        "rounds": args.rounds,
    }
    console.print(json.dumps(setting))
    if args.json:
        with open(args.json, "w") as file:
            json.dump(setting | {"results": results}, file, indent=2)


if __name__ == "__main__":
    main()
