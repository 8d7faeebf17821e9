"""A neural ODE (diffrax): learn the field that drives a spiral from paths through it."""

from dataclasses import dataclass

import diffrax
import equinox as eqx
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from pictures import COLORS, figure
from scipy.integrate import solve_ivp

import eqxshard

TIMES = np.linspace(0, 8, 40, dtype=np.float32)
WINDOW = 10  # The number of times in a piece of a path, from which the field learns.
SHOWN = 5


def solve(field, start, times):
    """The path from `start`, at some times."""
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(lambda t, y, args: field(y)),
        diffrax.Tsit5(),
        t0=times[0],
        t1=times[-1],
        dt0=0.1,
        y0=start,
        saveat=diffrax.SaveAt(ts=times),
        stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-5),
        max_steps=512,
    )
    return solution.ys


def spiral(y):
    """The field to learn, at points of shape (count, 2)."""
    return y**3 @ np.array([[-0.1, -1.0], [1.0, -0.1]])


def make_field(key):
    return eqx.nn.MLP(2, 2, 64, depth=2, activation=jax.nn.tanh, key=key)


def predict(field, batch):
    times = TIMES[: batch["path"].shape[1]]
    return jax.vmap(lambda path: solve(field, path[0], times))(batch["path"])


def loss_fn(field, batch, key):
    return jnp.mean((predict(field, batch) - batch["path"]) ** 2, axis=(1, 2))


def metric_fn(field, batch):
    return {"loss": loss_fn(field, batch, None)}


def make_paths(count, seed):
    """Paths from points around the middle, by SciPy, which needs no devices."""
    rng = np.random.default_rng(seed)
    angle = rng.uniform(0, 2 * np.pi, count)
    radius = rng.uniform(0.6, 1.4, count)
    starts = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)

    def change(_, y):
        return spiral(y.reshape(count, 2)).ravel()

    ends = (TIMES[0], TIMES[-1])
    solution = solve_ivp(change, ends, starts.ravel(), t_eval=TIMES, rtol=1e-6)
    paths = solution.y.reshape(count, 2, len(TIMES))
    return np.moveaxis(paths, -1, 1).astype(np.float32)


def cut(path, generator):
    """A piece of a path, another one in every epoch: short ones are easier to learn."""
    first = generator.integers(len(TIMES) - WINDOW + 1)
    return {"path": path[first : first + WINDOW]}


def draw(path, field, true, found):
    grid = np.linspace(-1.4, 1.4, 15, dtype=np.float32)
    points = np.stack(np.meshgrid(grid, grid), axis=-1)
    arrows = np.asarray(eqxshard.filter_jit(jax.vmap(jax.vmap(field)))(points))
    with figure(path, 1, 2, size=(7, 3.4)) as axes:
        left, right = axes[0]
        for found_path, true_path in zip(found, true):
            left.plot(*true_path.T, ".", color=COLORS[1], markersize=4)
            left.plot(*found_path.T, color=COLORS[0], linewidth=1)
        left.set_title("unseen paths: true (dots), learned (lines)")
        right.quiver(grid, grid, arrows[..., 0], arrows[..., 1], color=COLORS[0])
        right.set_title("the learned field")
        for ax in axes[0]:
            ax.set_aspect("equal")


@dataclass(frozen=True)
class Args:
    """Learn a vector field from 1,024 paths through it."""

    run: eqxshard.RunConfig = eqxshard.RunConfig(
        batch_size=64, evaluate_every=250, save_every=250
    )


def main(args: Args) -> str:
    paths = grain.MapDataset.source([*make_paths(1024, args.run.seed)])
    test_paths = make_paths(256, args.run.seed + 1)
    run = eqxshard.train(
        make_field,
        loss_fn,
        metric_fn,
        lambda steps: optax.adam(optax.cosine_decay_schedule(5e-3, steps)),
        paths.seed(args.run.seed).shuffle().random_map(cut),
        {"path": test_paths},
        config=args.run,
        steps=1000,
    )
    few = test_paths[:SHOWN]
    found = np.asarray(eqxshard.filter_jit(predict)(run.state.model, {"path": few}))
    draw(run.folder / "paths.png", run.state.model, few, found)
    return f"test loss {run.metrics['loss']:.2e} | {run.speed} | {run.title}"


if __name__ == "__main__":
    eqxshard.cli(main, Args)
