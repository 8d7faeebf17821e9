"""A tour of parallelism: each collective, and each way to split one model over devices.

The classifier knows nothing of devices. What changes from one strategy to the next is a
mesh and a rule, and nothing else; every strategy ends at the same loss.
"""

import math
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from equinox import nn
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

import eqxshard
from eqxshard import data
from eqxshard.mesh import describe
from eqxshard.parallel import collectives, mixture_of_experts, pipeline, ring_attention


class Classifier(eqx.Module):
    """The types say which dim is which: `by_dim` splits `mlp`, columns then rows."""

    hidden: Annotated[nn.Linear, "mlp pixels"]
    dropout: nn.Dropout
    logits: Annotated[nn.Linear, "classes mlp"]

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.hidden = nn.Linear(784, 512, key=k1)
        self.dropout = nn.Dropout(0.1)
        self.logits = nn.Linear(512, 10, key=k2)

    def __call__(self, x, key=None):
        x = jax.nn.silu(self.hidden(x))
        return self.logits(self.dropout(x, key=key))


def loss_fn(model, batch, key):
    keys = jax.random.split(key, len(batch["label"]))
    logits = jax.vmap(model)(batch["image"], keys).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


# What each needs at least, where -1 takes what is left: sizes of mesh axes, and a rule.
TENSOR = eqxshard.by_dim({"mlp": "tensor"})
FSDP = eqxshard.fsdp(min_size=2**10)
STRATEGIES: dict[str, tuple[dict[str, Any], eqxshard.Rule]] = {
    "data parallel": ({"data": -1}, eqxshard.replicate()),
    "ZeRO-1": ({"data": -1}, eqxshard.zero1(min_size=2**10)),
    "FSDP (ZeRO-3)": ({"data": 1, "fsdp": -1}, FSDP),
    "hybrid": ({"data": 2, "fsdp": -1}, FSDP),
    "tensor": ({"data": 1, "tensor": -1}, TENSOR),
    "tensor + data": ({"data": -1, "tensor": 2}, TENSOR),
    "tensor + ZeRO-1": (
        {"data": -1, "tensor": 2},
        eqxshard.combine(TENSOR, eqxshard.zero1(min_size=2**10)),
    ),
    "tensor + FSDP": (
        {"data": 1, "fsdp": -1, "tensor": 2},
        eqxshard.combine(TENSOR, FSDP),
    ),
    "tensor + hybrid": (
        {"data": 2, "fsdp": -1, "tensor": 2},
        eqxshard.combine(TENSOR, FSDP),
    ),
}


@dataclass(frozen=True)
class Args:
    """Show every collective and every strategy on simulated devices, or on real ones."""

    devices: int = 8
    """How many devices; CPU devices are simulated."""
    steps: int = 20
    """How many steps to train with each strategy."""
    batch_size: int = 128
    """Examples per step, over all devices."""
    seed: int = 0
    """Decides the initial parameters, the dropout and the data."""


def show_collectives(mesh: Mesh, console: Console) -> None:
    """Each device starts with its own number, and a row of numbers."""
    n = mesh.size
    column, rows = jnp.arange(n), jnp.arange(n * n).reshape(n, n)

    def per_device(number, row):
        key = collectives.fold_in_axes(jax.random.key(0), "data")
        return {
            "psum: the sum, on every device": jax.lax.psum(number, "data")[None],
            "pmean: the mean": jax.lax.pmean(number.astype(float), "data")[None],
            "all_gather: all parts, on every device": jax.lax.all_gather(
                number, "data", tiled=True
            )[None],
            "psum_scatter: to each its part of the sum": collectives.psum_scatter(
                row[0], "data"
            )[None],
            "shift: what the neighbour before has": collectives.shift(number, "data")[None],
            "shift, no wrap": collectives.shift(number, "data", wrap=False)[None],
            "all_to_all: rows become columns": jax.lax.all_to_all(
                row, "data", split_axis=1, concat_axis=0, tiled=True
            ).T,
            "fold_in_axes: a random number of its own": jax.random.uniform(key, (1, 1)),
        }

    mapped = eqxshard.filter_shard_map(per_device, mesh, (P("data"), P("data")), P("data"))
    table = Table(title=f"collectives: device i has i, and row i of 0..{n * n - 1}")
    for head in ("collective", "device 0", f"device {n - 1}"):
        table.add_column(head)
    for name, out in eqxshard.filter_jit(mapped)(column, rows).items():
        out = np.asarray(out).reshape(n, -1)
        words = [np.array2string(out[i], precision=3) for i in (0, n - 1)]
        table.add_row(name, *words)
    console.print(table)


def train(sizes: dict[str, Any], rule: eqxshard.Rule, batches: Any, args: Args) -> Any:
    """Train the classifier: the losses, the state after them, and the mesh."""
    count = args.devices if -1 in sizes.values() else math.prod(sizes.values())
    mesh = eqxshard.make_mesh(**sizes, devices=jax.devices()[:count])
    optim = optax.adamw(1e-3)
    precision = eqxshard.Precision(compute=jnp.bfloat16)
    key = jax.random.key(args.seed)
    state = eqxshard.init_state(
        Classifier, optim, key=key, mesh=mesh, rule=rule, precision=precision
    )
    train_step = eqxshard.make_train_step(
        loss_fn, optim, mesh=mesh, rule=rule, accumulate=4, precision=precision
    )
    parts = []
    for batch in batches:
        state, metrics = train_step(state, batch)
        parts.append(metrics)
    return eqxshard.Metrics.stack(parts)["loss"], state, mesh


def show_parameters(name: str, state: Any, mesh: Mesh, console: Console) -> None:
    table = Table(title=f"{name}: {describe(mesh)}")
    for head in ("parameter", "shape", "spec", "part on each device", "Adam's"):
        table.add_column(head)
    moments = state.opt_state[0].mu
    for (path, leaf), moment in zip(
        jax.tree_util.tree_leaves_with_path(eqx.filter(state.model, eqx.is_array)),
        jax.tree.leaves(moments),
        strict=True,
    ):
        shapes = (leaf.shape, leaf.sharding.shard_shape(leaf.shape))
        whole, part = (" x ".join(map(str, shape)) for shape in shapes)
        there = " x ".join(map(str, moment.sharding.shard_shape(moment.shape)))
        path = jax.tree_util.keystr(path, simple=True, separator=".")
        table.add_row(path, whole, str(leaf.sharding.spec), part, there)
    console.print(table)


def show_strategies(args: Args, console: Console) -> float:
    """Train with each strategy; the largest relative difference of the last loss."""
    source = data.synthetic_fashion("train")
    rng = np.random.default_rng(args.seed)
    batches = []
    for _ in range(args.steps):
        batch = source.gather(rng.integers(0, len(source), args.batch_size))
        image = batch["image"].reshape(args.batch_size, -1).astype(np.float32)
        batches.append({"image": image / 255 - 0.5, "label": batch["label"]})

    expected, _, _ = train({"data": 1}, eqxshard.replicate(), batches, args)
    summary = Table(title=f"{args.steps} steps in bfloat16, 4 microbatches each")
    for head in ("strategy", "mesh", "last loss", "difference"):
        summary.add_column(
            head, justify="left" if head in ("strategy", "mesh") else "right"
        )
    summary.add_row("one device", "", f"{expected[-1]:.5f}", "")
    worst = 0.0
    for name, (sizes, rule) in STRATEGIES.items():
        fixed = abs(math.prod(sizes.values()))
        if args.devices % fixed:
            summary.add_row(name, f"needs a multiple of {fixed} devices", "", "")
            continue
        losses, state, mesh = train(sizes, rule, batches, args)
        show_parameters(name, state, mesh, console)
        difference = float(np.max(np.abs(losses - expected) / expected))
        worst = max(worst, difference)
        summary.add_row(name, describe(mesh), f"{losses[-1]:.5f}", f"{difference:.1e}")
    console.print(summary)
    return worst


def show_models_of_their_own(args: Args, console: Console) -> float:
    """Sequences, layers and experts have axes that the classifier has no use for."""
    n = args.devices
    key = jax.random.key(args.seed)
    x = jax.random.normal(key, (4, 64, n, 16))
    make_layer = lambda key: nn.Linear(64, 64, key=key)  # noqa: E731
    layers = eqx.filter_vmap(make_layer)(jax.random.split(key, 2 * n))
    tokens, logits = x[..., 0, :], jax.random.normal(key, (4, 64, 2 * n))
    make_expert = lambda key: nn.MLP(16, 16, 32, 1, key=key)  # noqa: E731
    experts = eqx.filter_vmap(make_expert)(jax.random.split(key, 2 * n))

    def attend(x):
        return ring_attention(x, x, x, causal=True)

    def pipe(layers, x):
        return pipeline(layers, x, microbatches=4)

    def mix(experts, x, logits):
        return mixture_of_experts(experts, x, logits, k=2).output

    table = Table(title="sequences, layers and experts: gradients against one device")
    for head in ("what", "mesh", "largest relative difference"):
        table.add_column(head)
    worst = 0.0
    examples = [
        ("ring attention", "context", attend, (x,), (P(None, "context"),)),
        ("pipeline", "stage", pipe, (layers, x[:, :, 0, 0]), (P("stage"), P())),
        (
            "mixture of experts",
            "expert",
            mix,
            (experts, tokens, logits),
            (P("expert"), P(None, "expert"), P(None, "expert")),
        ),
    ]
    for name, axis, fn, arguments, specs in examples:
        sizes: dict[str, Any] = {"data": 1, axis: n}
        mesh = eqxshard.make_mesh(**sizes, devices=jax.devices()[:n])

        def gradient(arguments, fn=fn):
            return eqx.filter_grad(lambda args: jnp.sum(fn(*args) ** 2))(arguments)

        expected = eqxshard.filter_jit(gradient)(arguments)
        places = tuple(jax.NamedSharding(mesh, spec) for spec in specs)
        with jax.set_mesh(mesh):
            placed = eqxshard.filter_shard(arguments, places)
            found = eqxshard.filter_jit(gradient)(placed)
        difference = max(
            float(np.max(np.abs(np.asarray(a) - np.asarray(b))) / np.max(np.abs(b)))
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
        )
        worst = max(worst, difference)
        table.add_row(name, describe(mesh), f"{difference:.1e}")
    console.print(table)
    return worst


def tour(args: Args) -> str:
    if args.devices < 1 or args.steps < 1:
        raise ValueError(
            f"--devices {args.devices} --steps {args.steps} is too few; use 1 or more."
        )
    jax.config.update("jax_num_cpu_devices", args.devices)
    try:
        count = len(jax.devices())
    # JAX asserts that there is a CUDA plugin, and says nothing where there is none.
    except (AssertionError, RuntimeError) as error:
        raise ValueError(f"JAX finds no devices ({error}); unset JAX_PLATFORMS.") from None
    if args.devices > count:
        raise ValueError(
            f"--devices {args.devices} is more than the {count} that there are; use fewer."
        )
    # A file is as wide as need be.
    console = Console(width=None if sys.stdout.isatty() else 120)
    show_collectives(
        eqxshard.make_mesh(data=args.devices, devices=jax.devices()[: args.devices]),
        console,
    )
    strategies = show_strategies(args, console)
    others = show_models_of_their_own(args, console)
    return (
        f"all strategies end at the same loss: within {strategies:.1e} (bfloat16) | "
        f"ring attention, pipeline, experts: within {others:.1e} (float32)"
    )


def main() -> int:
    args = tyro.cli(Args)
    eqxshard.cache_compilations()
    try:
        print(tour(args))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
