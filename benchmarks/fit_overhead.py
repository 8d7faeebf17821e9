"""Microseconds per step of `fit`, without callbacks and with some, and of a loop by hand.

The step is that of `step_overhead.py`, of a model so small that only the overhead shows.
All take the same batch again and again, and report their metrics every 50 steps; one of the
callbacks looks at the metrics every 100 steps, another is called after each step. The loop
by hand is the baseline.

    python benchmarks/fit_overhead.py --output build/benchmarks
"""

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
from eqxshard.callbacks import Callback
from eqxshard.sharding import batch_sharding
from eqxshard.training import Metrics

WIDTH, BATCH_SIZE, LOG_EVERY = 16, 32, 50
OPTIM = optax.adam(1e-3)


class Looks(Callback):
    """Reads the metrics every 100 steps."""

    every = 100

    def after_step(self, loop: Any) -> None:
        loop.metrics.compute()


class Counts(Callback):
    """Is called after each step, and does next to nothing."""

    def __init__(self):
        self.calls = 0

    def after_step(self, loop: Any) -> None:
        self.calls += 1


class Again:
    """A loader that always has the same batch."""

    def __init__(self, batch: Any):
        self._batch = batch

    def seek(self, step: int) -> None:
        pass

    def __iter__(self) -> Any:
        while True:
            yield self._batch


class Keeps:
    """A tracker that keeps the last report."""

    def log(self, step: int, values: Any) -> None:
        self.last = values

    def close(self, error: BaseException | None = None) -> None:
        pass


def losses(model: Any, batch: Any, key: Any) -> Any:
    return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2, axis=-1)


def by_hand(start: Callable[[], Any], train_step: Any, batch: Any, steps: int) -> None:
    state, tracker, history = start(), Keeps(), []
    for step in range(1, steps + 1):
        state, metrics = train_step(state, batch)
        history.append(metrics)
        if step % LOG_EVERY == 0:
            tracker.log(step, Metrics.stack(history).compute())
            history.clear()
    jax.block_until_ready(state)


def by_fit(
    start: Callable[[], Any], train_step: Any, batch: Any, steps: int, *callbacks: Any
) -> None:
    state = eqxshard.fit(
        start(),
        train_step,
        Again(batch),
        steps=steps,
        log_every=LOG_EVERY,
        trackers=[Keeps()],
        callbacks=callbacks,
    )
    jax.block_until_ready(state)


def microseconds(run: Callable[[], None], steps: int) -> float:
    before = time.perf_counter()
    run()
    return (time.perf_counter() - before) / steps * 1e6


def main() -> None:
    options = parser(__doc__, rounds=30)
    options.add_argument("--steps", type=int, default=2_000)
    args = options.parse_args()
    mesh = eqxshard.make_mesh(devices=jax.devices()[:1])
    where: Any = {"mesh": mesh, "rule": eqxshard.replicate()}
    x, y = jax.random.normal(jax.random.key(1), (2, BATCH_SIZE, WIDTH))
    batch = eqxshard.filter_shard({"x": x, "y": y}, batch_sharding(mesh))
    make_model = lambda key: eqx.nn.MLP(WIDTH, WIDTH, WIDTH, 1, key=key)  # noqa: E731
    state = eqxshard.init_state(make_model, OPTIM, key=jax.random.key(0), **where)
    train_step = eqxshard.make_train_step(losses, OPTIM, **where)

    def start() -> Any:
        return jax.tree.map(lambda leaf: leaf.copy() if eqx.is_array(leaf) else leaf, state)

    given = start, train_step, batch, args.steps
    turns = {
        "a loop by hand": partial(by_hand, *given),
        "eqxshard.fit": partial(by_fit, *given),
        "eqxshard.fit, metrics read every 100 steps": partial(by_fit, *given, Looks()),
        "eqxshard.fit, a callback after each step": partial(by_fit, *given, Counts()),
    }
    values = take_turns(
        {name: partial(microseconds, turn, args.steps) for name, turn in turns.items()},
        args.rounds,
    )
    contest = Contest("depth 2, one device", "microseconds per step", values)
    setting = {"width": WIDTH, "batch_size": BATCH_SIZE, "steps": args.steps}
    Report("fit_overhead", [contest], setting).show_and_write(args.output)


if __name__ == "__main__":
    main()
