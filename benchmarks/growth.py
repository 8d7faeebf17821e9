"""How time grows with the model, with the number of steps, and with the dataset.

- Microseconds per step against the number of parameters, of leaves and of layers, and
  seconds of a loop against its number of steps. The baseline is `jax.jit` over arrays that
  were flattened by hand. A power is fitted to each contestant's medians: an exponent of 1
  is proportional growth, one near 0 a fixed cost.
- Seconds to compile a step, and microseconds per step, against the number of layers. The
  baseline is a Python loop over the layers, compared with `eqxshard.scan_layers`, which
  compiles one layer. By default `scan_layers` recomputes each layer in the backward pass
  (remat); the loop and `remat="none"` do not.
- Seconds to make a state of many layers in a list, and to save it for the first time, both
  with compilation. The baseline is Equinox, eagerly, on one device.
- Batches per second of `eqxshard.Loader` against the number of (tiny) examples. The
  baseline is NumPy, which leaves batches on the host; it also runs with `jax.device_put`.

    python benchmarks/growth.py --output build/benchmarks
"""

import argparse
import contextlib
import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _side_by_side import Contest, Growth, Report, Turn, parser, take_turns

import eqxshard
from eqxshard.sharding import batch_sharding

BATCH_SIZE, WIDTH = 128, 64
#: The rows of a batch of the models that grow, and the elements of a small leaf.
ROWS, LEAF = 32, 16
OPTIM = optax.adam(1e-3)


class Line(eqx.Module):
    """Layers of `width` in a row, without biases."""

    layers: list[eqx.nn.Linear]

    def __init__(self, depth: int, width: int, key: Any):
        self.layers = [
            eqx.nn.Linear(width, width, use_bias=False, key=each)
            for each in jax.random.split(key, depth)
        ]

    def __call__(self, x):
        """The output of the last layer."""
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


class Scales(eqx.Module):
    """Many small leaves: vectors that scale the input one after the other."""

    scales: list[jax.Array]

    def __init__(self, leaves: int, key: Any):
        self.scales = [*jax.random.normal(key, (leaves, LEAF))]

    def __call__(self, x):
        """The product of the input and all vectors."""
        for scale in self.scales:
            x = x * scale
        return x


def mean_squares(model: Any, batch: Any, key: Any) -> Any:
    return jnp.mean(jax.vmap(model)(batch["x"]) ** 2, axis=-1)


def make_steps(make: Callable[[Any], Any], width: int) -> dict[str, Callable[[int], None]]:
    """Functions that take a number of steps: by hand, and by eqxshard."""
    mesh, rule, key = eqxshard.make_mesh(data=1), eqxshard.replicate(), jax.random.key(0)
    x = jax.random.normal(jax.random.key(1), (ROWS, width))
    batch = eqxshard.filter_shard({"x": x}, batch_sharding(mesh))
    state = eqxshard.init_state(make, OPTIM, key=key, mesh=mesh, rule=rule)
    train_step = eqxshard.make_train_step(mean_squares, OPTIM, mesh=mesh, rule=rule)
    params, static = eqx.partition(make(key), eqx.is_array)
    flat, treedef = jax.tree.flatten((params, OPTIM.init(params)))

    @partial(jax.jit, donate_argnums=0)
    def jitted(flat, batch):
        params, opt_state = jax.tree.unflatten(treedef, flat)

        def mean(params):
            return jnp.mean(mean_squares(eqx.combine(params, static), batch, None))

        loss, grads = jax.value_and_grad(mean)(params)
        updates, opt_state = OPTIM.update(grads, opt_state, params)
        return jax.tree.leaves((optax.apply_updates(params, updates), opt_state)), loss

    def by_hand(steps: int) -> None:
        nonlocal flat
        loss = None
        for _ in range(steps):
            flat, loss = jitted(flat, batch)
        jax.block_until_ready(loss)

    def by_eqxshard(steps: int) -> None:
        nonlocal state
        metrics = None
        for _ in range(steps):
            state, metrics = train_step(state, batch)
        jax.block_until_ready(metrics)

    return {"jax.jit, flattened by hand": by_hand, "eqxshard": by_eqxshard}


def seconds_of(run: Callable[[int], None], steps: int) -> float:
    start = time.perf_counter()
    run(steps)
    return time.perf_counter() - start


def microseconds_of(run: Callable[[int], None], seconds: float) -> float:
    """Microseconds of one step, measured for about `seconds`."""
    once = seconds_of(run, 1)
    steps = max(int(seconds / once), 1)
    return seconds_of(run, steps) / steps * 1e6


def grow(
    what: str, sizes: list[int], make: Callable[[int], Any], rounds: int, seconds: float
) -> Growth:
    """The time of a step of models of growing size: `make` gives one, and its width."""
    contests = []
    for size in sizes:
        runs = make_steps(*make(size))
        turns = {name: partial(microseconds_of, run, seconds) for name, run in runs.items()}
        title = f"a step, {size:,} {what}"
        contests.append(Contest(title, "us/step", take_turns(turns, rounds)))
    return Growth(f"a step by the number of {what}", sizes, contests)


def against_model(args: argparse.Namespace) -> list[Growth]:
    """The time of a step by the number of parameters, leaves and layers."""

    def of_size(parameters: int) -> Any:
        width = math.isqrt(parameters // 4)
        return partial(Line, 4, width), width

    def of_leaves(leaves: int) -> Any:
        return partial(Scales, leaves), LEAF

    def of_depth(layers: int) -> Any:
        return partial(Line, layers, 64), 64

    given = args.rounds, args.seconds
    return [
        grow("parameters", args.parameters, of_size, *given),
        grow("leaves", args.leaves, of_leaves, *given),
        grow("layers of 64 x 64", args.layers, of_depth, *given),
    ]


def against_steps(counts: list[int], rounds: int) -> Growth:
    """The time of a loop by its number of steps."""
    runs, contests = make_steps(partial(Line, 4, 16), 16), []
    for count in counts:
        turns = {name: partial(seconds_of, run, count) for name, run in runs.items()}
        values = take_turns(turns, rounds)
        contests.append(Contest(f"a loop of {count:,} steps", "s", values))
    return Growth("a loop by the number of steps", counts, contests)


class Block(eqx.Module):
    """A residual layer."""

    norm: eqx.nn.LayerNorm
    linear: eqx.nn.Linear

    def __init__(self, key):
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.linear = eqx.nn.Linear(WIDTH, WIDTH, key=key)

    def __call__(self, x):
        """The input of the next layer."""
        return x + jax.nn.gelu(self.linear(self.norm(x)))


def looped(depth: int) -> tuple[Any, Any]:
    """Functions that make a list of layers, and apply them in a Python loop."""

    def apply(blocks, x):
        for block in blocks:
            x = block(x)
        return x

    return lambda key: [Block(each) for each in jax.random.split(key, depth)], apply


def scanned(depth: int, remat: Any) -> tuple[Any, Any]:
    """Functions that make stacked layers, and apply them in a scan."""

    def apply(blocks, x):
        return eqxshard.scan_layers(blocks, x, remat=remat)

    return lambda key: eqx.filter_vmap(Block)(jax.random.split(key, depth)), apply


def against_depth(depths: list[int], rounds: int) -> list[Contest]:
    contests = []
    mesh, rule, optim = eqxshard.make_mesh(data=1), eqxshard.replicate(), OPTIM
    x = jax.random.normal(jax.random.key(1), (BATCH_SIZE, WIDTH))
    batch = eqxshard.filter_shard({"x": x}, batch_sharding(mesh))
    for depth in depths:
        compiles, steps = {}, {}
        for name, (make, apply) in {
            "a Python loop": looped(depth),
            "eqxshard.scan_layers": scanned(depth, remat="full"),
            "eqxshard.scan_layers, remat=none": scanned(depth, remat="none"),
        }.items():

            def loss_fn(blocks, batch, key, apply=apply):
                return jnp.mean(jax.vmap(lambda x: apply(blocks, x))(batch["x"]) ** 2, -1)

            key = jax.random.key(0)
            state = eqxshard.init_state(make, optim, key=key, mesh=mesh, rule=rule)

            def make_step(loss_fn=loss_fn):
                return eqxshard.make_train_step(loss_fn, optim, mesh=mesh, rule=rule)

            compiles[name] = compile_seconds(make_step, state, batch)
            steps[name] = step_microseconds(make_step(), state, batch)
        seconds = take_turns(compiles, rounds)
        contests.append(Contest(f"depth {depth}, to compile", "s", seconds))
        microseconds = take_turns(steps, rounds)
        contests.append(Contest(f"depth {depth}, to run", "us/step", microseconds))
    return contests


def compile_seconds(make_step: Callable[[], Any], state: Any, batch: Any) -> Turn:
    def turn() -> float:
        start = time.perf_counter()
        # A new step each time, because a step caches what it compiled.
        make_step().lower(state, batch).compile()
        return time.perf_counter() - start

    return turn


def step_microseconds(train_step: Any, state: Any, batch: Any, count: int = 20) -> Turn:
    def turn() -> float:
        nonlocal state
        start = time.perf_counter()
        metrics = None
        for _ in range(count):
            state, metrics = train_step(state, batch)
        jax.block_until_ready(metrics)
        return (time.perf_counter() - start) / count * 1e6

    return turn


def against_examples(sizes: list[int], rounds: int, seconds: float) -> list[Contest]:
    contests = []
    mesh = eqxshard.make_mesh(data=1)
    for size in sizes:
        x = np.random.default_rng(0).integers(0, 256, (size, 16), np.uint8)
        source = eqxshard.data.ArraySource({"x": x})
        loader = eqxshard.Loader(source, batch_size=BATCH_SIZE, mesh=mesh, remainder="drop")
        turns = {
            "NumPy, on the host": batches_per_second(lambda x=x: with_numpy(x), seconds),
            "NumPy, and jax.device_put": batches_per_second(
                lambda x=x: (jax.device_put(batch) for batch in with_numpy(x)), seconds
            ),
            "eqxshard.Loader": batches_per_second(
                lambda loader=loader: iter(loader), seconds
            ),
        }
        title = f"{size:,} examples of 16 bytes, batches of {BATCH_SIZE}"
        contests.append(Contest(title, "batches/s", take_turns(turns, rounds)))
    return contests


def with_numpy(x: np.ndarray) -> Generator[np.ndarray, None, None]:
    rng = np.random.default_rng(0)
    while True:
        order = rng.permutation(len(x))
        for start in range(0, len(x) - BATCH_SIZE + 1, BATCH_SIZE):
            yield x[order[start : start + BATCH_SIZE]]


def batches_per_second(
    make: Callable[[], Generator[Any, None, None]], seconds: float
) -> Turn:
    def turn() -> float:
        threads = threading.active_count()
        with contextlib.closing(make()) as batches:
            batch = next(batches)  # startup and the first shuffle do not count
            count, start = 0, time.perf_counter()
            while time.perf_counter() - start < seconds:
                batch = next(batches)
                count += 1
            jax.block_until_ready(batch)
            rate = count / (time.perf_counter() - start)
        while threading.active_count() > threads:  # which would slow the next turn
            time.sleep(0.001)
        return rate

    return turn


def against_start(
    layers: list[int], models: list[str], rounds: int
) -> tuple[list[Contest], list[Growth]]:
    """The time of making and saving the first state, of published models and by layers."""
    given = map(str, ["--layers", *layers, "--models", *models, "--rounds", rounds])
    script = Path(__file__).parent / "_first_state.py"
    done = subprocess.run(
        [sys.executable, str(script), *given], check=True, stdout=subprocess.PIPE, text=True
    )
    found = json.loads(done.stdout.splitlines()[-1])

    def contest(name: str, task: int, title: str) -> Contest:
        values = {who: [each[task] for each in turns] for who, turns in found[name].items()}
        return Contest(title, "s", values)

    tasks = ["to make a state", "to save it for the first time"]
    contests = [
        contest(name, i, f"{name}, {task}")
        for name in models
        for i, task in enumerate(tasks)
    ]
    growths = [
        Growth(
            f"{task}, by the number of layers",
            layers,
            [contest(str(n), i, f"{n} layers of 64 x 64, {task}") for n in layers],
        )
        for i, task in enumerate(tasks)
    ]
    return contests, growths


def main() -> None:
    options = parser(__doc__, rounds=5)
    sizes = {
        "--parameters": [1_024, 16_384, 262_144, 4_194_304],
        "--leaves": [8, 32, 128],
        "--layers": [2, 8, 32],
        "--steps": [100, 1_000, 10_000],
    }
    for name, default in sizes.items():
        options.add_argument(name, type=int, nargs="+", default=default, metavar="N")
    options.add_argument(
        "--listed", type=int, nargs="+", default=[12, 48, 96, 192, 400], metavar="N"
    )
    published = ["resnet50", "vit_b16", "convnext_t"]
    gallery = [f"gallery_{name}" for name in ("resnet", "vit", "rnn", "diffusion", "gan")]
    options.add_argument(
        "--models", nargs="*", default=[*published, *gallery], metavar="NAME"
    )
    options.add_argument("--depths", type=int, nargs="+", default=[4, 16, 64], metavar="N")
    options.add_argument(
        "--examples", type=int, nargs="+", default=[60_000, 600_000, 6_000_000], metavar="N"
    )
    options.add_argument("--seconds", type=float, default=0.5, help="length of a turn")
    args = options.parse_args()
    starts, started = against_start(args.listed, args.models, args.rounds)
    contests = [
        *starts,
        *against_depth(args.depths, args.rounds),
        *against_examples(args.examples, args.rounds, args.seconds),
    ]
    growths = [*started, *against_model(args), against_steps(args.steps, args.rounds)]
    Report("growth", contests, {"rounds": args.rounds}, growths).show_and_write(args.output)


if __name__ == "__main__":
    main()
