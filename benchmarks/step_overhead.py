"""Microseconds per training step of a model so small that only the overhead shows.

The same step (an MLP of width 16, mean squared error, Adam) as eqxshard's `train_step`,
with and without its guard against non-finite values, and 64 in one dispatch; under
`equinox.filter_jit`; in Flax NNX under `nnx.jit`, and in the two ways that its performance
guide recommends for small models; and under a `jax.jit` whose arrays are flattened by hand.
That last one is the baseline: a call costs nothing but JAX's own dispatch, and there is no
guard. All donate what they replace.

    python benchmarks/step_overhead.py --output build/benchmarks
"""

import importlib
import importlib.util
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from _side_by_side import Contest, Report, parser, take_turns

import eqxshard
from eqxshard.sharding import batch_sharding
from eqxshard.training import TrainStep

WIDTH, BATCH_SIZE, STACKED = 16, 32, 64
OPTIM = optax.adam(1e-3)

#: Takes at least a number of steps, waits for the last one, and returns how many it took.
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
    batches = jax.tree.map(lambda x: jnp.stack([x] * STACKED), batch)
    batches = eqxshard.filter_shard(batches, batch_sharding(mesh, stacked=True))

    def run(steps: int) -> int:
        nonlocal state
        metrics, dispatches = None, -(-steps // STACKED)
        for _ in range(dispatches):
            state, metrics = train_step.many(state, batches)
        jax.block_until_ready(metrics)
        return dispatches * STACKED

    return run


def start(make_model: Any, mesh: Any, nonfinite: Any) -> tuple[Any, TrainStep]:
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


def start_nnx(depth: int, mesh: Any) -> tuple[Any, Any]:
    """The same model and optimizer in Flax NNX."""
    nnx = importlib.import_module("flax.nnx")

    class MLP(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List(
                [nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(depth)]
            )

        def __call__(self, x):
            for layer in self.layers[:-1]:
                x = nnx.relu(layer(x))
            return self.layers[-1](x)

    model = MLP(nnx.Rngs(0))
    nodes = model, nnx.Optimizer(model, OPTIM, wrt=nnx.Param)
    nnx.update(nodes, jax.device_put(nnx.state(nodes), jax.NamedSharding(mesh, jax.P())))
    return nodes


def update_nnx(model: Any, optimizer: Any, batch: Any) -> Any:
    nnx = importlib.import_module("flax.nnx")

    def mean(model):
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    loss, grads = nnx.value_and_grad(mean)(model)
    optimizer.update(model, grads)
    return loss


def by_nnx(depth: int, batch: Any, mesh: Any, cached: bool = False) -> Contestant:
    nnx = importlib.import_module("flax.nnx")
    nodes = start_nnx(depth, mesh)
    jitted = nnx.jit(update_nnx, donate_argnums=(0, 1))
    step = (nnx.cached_partial if cached else partial)(jitted, *nodes)

    def run(steps: int) -> int:
        loss = None
        for _ in range(steps):
            loss = step(batch)
        jax.block_until_ready(loss)
        return steps

    return run


def by_split_nnx(depth: int, batch: Any, mesh: Any) -> Contestant:
    nnx = importlib.import_module("flax.nnx")
    graphdef, state = nnx.split(start_nnx(depth, mesh))

    def step(graphdef, state, batch):
        model, optimizer = nnx.merge(graphdef, state)
        return update_nnx(model, optimizer, batch), nnx.state((model, optimizer))

    jitted = jax.jit(step, donate_argnums=1)

    def run(steps: int) -> int:
        nonlocal state
        loss = None
        for _ in range(steps):
            loss, state = jitted(graphdef, state, batch)
        jax.block_until_ready(loss)
        return steps

    return run


def model_and_batch(depth: int, mesh: Any) -> tuple[Any, Any]:
    """A function that makes the model, and a batch on the mesh."""

    def make_model(key):
        return eqx.nn.MLP(WIDTH, WIDTH, WIDTH, depth - 1, key=key)

    x, y = jax.random.normal(jax.random.key(1), (2, BATCH_SIZE, WIDTH))
    batch = eqxshard.filter_shard({"x": x, "y": y}, batch_sharding(mesh))
    return make_model, batch


def contestants(depth: int, mesh: Any) -> dict[str, Contestant]:
    """Contestants by name, the baseline first."""
    make_model, batch = model_and_batch(depth, mesh)
    args = make_model, batch, mesh
    contestants = {
        "jax.jit, flattened by hand": by_hand(*args),
        "eqxshard, nonfinite='ignore'": by_train_step(*args, "ignore"),
        "eqxshard, nonfinite='skip'": by_train_step(*args, "skip"),
        f"eqxshard, many({STACKED}), nonfinite='ignore'": by_many(*args, "ignore"),
        f"eqxshard, many({STACKED}), nonfinite='skip'": by_many(*args, "skip"),
        "equinox.filter_jit": by_equinox(*args),
    }
    if importlib.util.find_spec("flax"):
        args = depth, batch, mesh
        contestants["Flax NNX, nnx.jit"] = by_nnx(*args)
        contestants["Flax NNX, nnx.cached_partial"] = by_nnx(*args, cached=True)
        contestants["Flax NNX, nnx.split and jax.jit"] = by_split_nnx(*args)
    return contestants


def microseconds(run: Contestant, seconds: float, max_in_flight: int) -> float:
    """Time one step, over `seconds` or more, with at most `max_in_flight` in flight."""
    steps = 16
    while True:
        done, start = 0, time.perf_counter()
        while done < steps:
            done += run(min(steps, max_in_flight))
        elapsed = time.perf_counter() - start
        if elapsed >= seconds:
            return elapsed / done * 1e6
        steps *= 2


def main() -> None:
    options = parser(__doc__, rounds=21)
    options.add_argument("--depths", type=int, nargs="+", default=[4, 48], metavar="N")
    options.add_argument("--devices", type=int, default=1)
    options.add_argument("--seconds", type=float, default=0.05, help="length of each turn")
    args = options.parse_args()
    jax.config.update("jax_num_cpu_devices", args.devices)
    mesh = eqxshard.make_mesh(devices=jax.devices()[: args.devices])

    # Collectives of simulated devices share one pool of threads: they deadlock when too
    # many steps are in flight.
    max_in_flight = sys.maxsize if args.devices == 1 else 16
    if not importlib.util.find_spec("flax"):
        print("Flax is not installed; it is left out.")
    contests = []
    for depth in args.depths:
        turns = {
            name: partial(microseconds, run, args.seconds, max_in_flight)
            for name, run in contestants(depth, mesh).items()
        }
        values = take_turns(turns, args.rounds)
        contests.append(Contest(f"depth {depth}", "us/step", values))
    setting = {"width": WIDTH, "batch_size": BATCH_SIZE, "rounds": args.rounds}
    Report("step_overhead", contests, setting).show_and_write(args.output)


if __name__ == "__main__":
    main()
