"""How speed scales with the number of devices, the depth and the size of the dataset.

- Steps per second of an MLP against the number of simulated CPU devices, with a fixed
  number of examples per device. The baseline is the same global batch on one device. The
  simulated devices share the machine's cores, so a step on 8 devices has 4 times the work
  of one on 2, and ideally takes 4 times as long: a ratio to the baseline of 1. (More than 1
  is possible, because one device does not always keep all cores busy.)
- Seconds to compile a step, and microseconds per step, against the number of layers. The
  baseline is a Python loop over the layers, compared with `eqxshard.scan_layers`, which
  compiles one layer. By default `scan_layers` recomputes each layer in the backward pass
  (remat); the loop and `remat="none"` do not.
- Batches per second of `eqxshard.Loader` against the number of (tiny) examples. The
  baseline is NumPy, which leaves batches on the host; it also runs with `jax.device_put`.

    python benchmarks/growth.py --output build/benchmarks
"""

import contextlib
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack
from typing import Any

import _processes
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _peers._task import MLP_STEPS, Task
from _side_by_side import Contest, Report, Turn, parser, take_turns

import eqxshard

BATCH_SIZE, WIDTH = 128, 64


def against_devices(counts: list[int], rounds: int) -> list[Contest]:
    contests = []
    for count in counts:
        with ExitStack() as stack:
            turns = {}
            for devices in sorted({1, count}):
                task = Task("mlp", "", devices=devices, batch_size=BATCH_SIZE * count)
                process = stack.enter_context(_processes.Contestant("mlp_steps", task))
                process.ready()
                turns[f"eqxshard, {devices} device(s)"] = steps_per_second(process)
            title = f"{count} device(s), batch of {BATCH_SIZE * count}"
            contests.append(Contest(title, "steps/s", take_turns(turns, rounds)))
    return contests


def steps_per_second(process: _processes.Contestant) -> Turn:
    return lambda: MLP_STEPS / process.ask("train")["seconds"]


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
    mesh, rule, optim = eqxshard.make_mesh(data=1), eqxshard.replicate(), optax.adam(1e-3)
    x = jax.random.normal(jax.random.key(1), (BATCH_SIZE, WIDTH))
    batch = eqxshard.filter_shard({"x": x}, eqxshard.batch_sharding(mesh))
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


def main() -> None:
    options = parser(__doc__, rounds=5)
    options.add_argument(
        "--devices", type=int, nargs="+", default=[1, 2, 4, 8], metavar="N"
    )
    options.add_argument("--depths", type=int, nargs="+", default=[4, 16, 64], metavar="N")
    options.add_argument(
        "--examples", type=int, nargs="+", default=[60_000, 600_000, 6_000_000], metavar="N"
    )
    options.add_argument(
        "--seconds", type=float, default=0.5, help="length of a loader's turn"
    )
    args = options.parse_args()
    contests = [
        *against_devices(args.devices, args.rounds),
        *against_depth(args.depths, args.rounds),
        *against_examples(args.examples, args.rounds, args.seconds),
    ]
    Report("growth", contests, {"rounds": args.rounds}).show_and_write(args.output)


if __name__ == "__main__":
    main()
