"""A tour of parallelism: each collective, and each way to split one model over devices.

The classifier knows nothing of devices. From one strategy to the next only the mesh and
the rule change, and every strategy ends at the same loss.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from equinox import nn
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

import eqxshard
from eqxshard.parallel import mixture_of_experts, pipeline, ring_attention
from eqxshard.sharding import describe_mesh


class Classifier(eqx.Module):
    # The annotations name the dims: by_dim splits mlp in both layers.
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


REPLICATE = eqxshard.replicate()
ZERO1 = eqxshard.zero1(min_size=2**10)
FSDP = eqxshard.fsdp(min_size=2**10)
TENSOR = eqxshard.by_dim({"mlp": "tensor"})
STRATEGIES = {  # The mesh and the rule of each.
    "data parallel": ("data=-1", REPLICATE),
    "ZeRO-1": ("data=-1", ZERO1),
    "FSDP (ZeRO-3)": ("fsdp=-1", FSDP),
    "hybrid": ("data=2,fsdp=-1", FSDP),
    "tensor": ("tensor=-1", eqxshard.combine(TENSOR, REPLICATE)),
    "tensor + data": ("data=-1,tensor=2", eqxshard.combine(TENSOR, REPLICATE)),
    "tensor + ZeRO-1": ("data=-1,tensor=2", eqxshard.combine(TENSOR, ZERO1)),
    "tensor + FSDP": ("fsdp=-1,tensor=2", eqxshard.combine(TENSOR, FSDP)),
    "tensor + hybrid": ("data=2,fsdp=-1,tensor=2", eqxshard.combine(TENSOR, FSDP)),
}


@dataclass(frozen=True)
class Args:
    """Show every collective and every strategy, on simulated devices or on real ones."""

    devices: int = 8
    """How many devices; CPU devices are simulated."""
    steps: int = 20
    """How many steps to train with each strategy."""
    batch_size: int = 128
    """Examples per step, over all devices."""
    seed: int = 0
    """Decides the initial parameters, the dropout and the data."""


def show_collectives(mesh, console):
    """Each device starts with its own number, and a row of numbers."""
    n = mesh.size

    def per_device(number, row):
        key = jax.random.fold_in(jax.random.key(0), jax.lax.axis_index("data"))
        to_next = [(i, i + 1) for i in range(n - 1)]
        around = [*to_next, (n - 1, 0)]
        gathered = jax.lax.all_gather(number, "data", tiled=True)
        scattered = jax.lax.psum_scatter(row[0], "data", tiled=True)
        column = jax.lax.all_to_all(row, "data", 1, 0, tiled=True)
        return {
            "psum: the sum, on every device": jax.lax.psum(number, "data")[None],
            "pmean: the mean": jax.lax.pmean(number.astype(float), "data")[None],
            "all_gather: all parts, on every device": gathered[None],
            "psum_scatter: to each its part of the sum": scattered[None],
            "ppermute: the previous device's": jax.lax.ppermute(number, "data", around),
            "ppermute, not around": jax.lax.ppermute(number, "data", to_next),
            "all_to_all: rows become columns": column.T,
            "axis_index: a random number of its own": jax.random.uniform(key, (1, 1)),
        }

    mapped = eqxshard.filter_shard_map(per_device, mesh, (P("data"), P("data")), P("data"))
    out = eqxshard.filter_jit(mapped)(jnp.arange(n), jnp.arange(n * n).reshape(n, n))
    title = f"collectives: device i has i, and row i of 0..{n * n - 1}"
    table = Table("collective", "device 0", f"device {n - 1}", title=title)
    for name, values in out.items():
        rows = np.asarray(values).reshape(n, -1)[[0, -1]]
        table.add_row(name, *(np.array2string(row, precision=3) for row in rows))
    console.print(table)


def train(mesh, rule, batches, args):
    """Train with one strategy; return the losses and the state."""
    optim = optax.adamw(1e-3)
    state = eqxshard.init_state(
        Classifier,
        optim,
        key=jax.random.key(args.seed),
        mesh=mesh,
        rule=rule,
        precision=eqxshard.Precision(compute=jnp.bfloat16),
    )
    step = eqxshard.make_train_step(loss_fn, optim, accumulate=4)
    state, metrics = step.many(state, batches)
    return np.asarray(metrics["loss"]), state


def make_batches(args):
    """The batches of all steps, stacked."""
    source = eqxshard.data.synthetic_fashion("train")
    rng = np.random.default_rng(args.seed)
    rows = rng.integers(0, len(source), args.steps * args.batch_size)
    examples = source.gather(rows)
    pixels = examples["image"].reshape(-1, 784).astype(np.float32)
    return {
        "image": (pixels / 255 - 0.5).reshape(args.steps, args.batch_size, 784),
        "label": examples["label"].reshape(args.steps, args.batch_size),
    }


def show_strategies(args, console):
    """Train with each strategy; return the largest relative difference of the losses."""
    batches = make_batches(args)
    one_device = eqxshard.make_mesh(devices=jax.devices()[:1])
    expected, _ = train(one_device, REPLICATE, batches, args)
    title = f"{args.steps} steps in bfloat16, 4 microbatches each"
    summary = Table("strategy", "mesh", "last loss", "difference", title=title)
    summary.add_row("one device", "", f"{expected[-1]:.5f}", "")
    worst = 0.0
    for name, (text, rule) in STRATEGIES.items():
        fixed = abs(math.prod(eqxshard.run.parse_mesh(text).values()))
        if args.devices % fixed:
            summary.add_row(name, f"needs a multiple of {fixed} devices", "", "")
            continue
        mesh = eqxshard.run.mesh_from_text(text, devices=args.devices)
        losses, state = train(mesh, rule, batches, args)
        console.rule(name)
        console.print(eqxshard.explain(state.model, mesh, rule, optim=optax.adamw(1e-3)))
        difference = float(np.max(np.abs(losses - expected) / expected))
        worst = max(worst, difference)
        mesh_text = describe_mesh(mesh)
        summary.add_row(name, mesh_text, f"{losses[-1]:.5f}", f"{difference:.1e}")
    console.print(summary)
    return worst


def show_layers(args, console):
    """Split sequences, layers and experts, which have axes of their own."""
    devices = args.devices
    key = jax.random.key(args.seed)
    heads = jax.random.normal(key, (4, 64, devices, 16))
    features, tokens = heads[:, :, 0, 0], heads[:, :, 0]
    keys = jax.random.split(key, 2 * devices)
    layers = eqx.filter_vmap(lambda key: nn.Linear(64, 64, key=key))(keys)
    experts = eqx.filter_vmap(lambda key: nn.MLP(16, 16, 32, 1, key=key))(keys)
    logits = jax.random.normal(key, (4, 64, 2 * devices))

    def mix(experts, tokens, logits):
        return mixture_of_experts(experts, tokens, logits, k=2).output

    title = "ring attention, pipeline, experts: gradients against one device"
    table = Table("mesh", "largest relative difference", title=title)
    differences = []
    for axis, function, arguments, specs in [
        (
            "context",
            partial(ring_attention, causal=True),
            (heads, heads, heads),
            (P(None, "context"), P(None, "context"), P(None, "context")),
        ),
        (
            "stage",
            partial(pipeline, microbatches=4),
            (layers, features),
            (P("stage"), P()),
        ),
        (
            "expert",
            mix,
            (experts, tokens, logits),
            (P("expert"), P(None, "expert"), P(None, "expert")),
        ),
    ]:
        mesh = eqxshard.run.mesh_from_text(f"data=1,{axis}={devices}", devices=devices)
        difference = compare_with_one_device(function, arguments, specs, mesh)
        table.add_row(describe_mesh(mesh), f"{difference:.1e}")
        differences.append(difference)
    console.print(table)
    return max(differences)


def compare_with_one_device(function, arguments, specs, mesh):
    """The largest relative difference between the gradients on a mesh and on one device."""

    @eqxshard.filter_jit
    @eqx.filter_grad
    def gradient(arguments):
        return jnp.sum(function(*arguments) ** 2)

    expected = gradient(arguments)
    with jax.set_mesh(mesh):
        shardings = tuple(jax.NamedSharding(mesh, spec) for spec in specs)
        found = gradient(eqxshard.filter_shard(arguments, shardings))
    differences = [
        np.max(np.abs(np.asarray(ours) - np.asarray(theirs))) / np.max(np.abs(theirs))
        for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected))
    ]
    return float(max(differences))


def main(args: Args) -> str:
    if args.steps < 1 or args.batch_size < 1:
        raise eqxshard.UsageError("--steps and --batch-size must be at least 1.")
    mesh = eqxshard.run.mesh_from_text("data=-1", devices=args.devices)
    console = Console(width=None if Console().is_terminal else 120)
    show_collectives(mesh, console)
    strategies, layers = show_strategies(args, console), show_layers(args, console)
    return (
        f"all strategies end at the same loss: within {strategies:.1e} (bfloat16) | "
        f"ring attention, pipeline, experts: within {layers:.1e} (float32)"
    )


if __name__ == "__main__":
    eqxshard.cli(main, Args)
