"""Training steps that are not ours: each a function of `jax.jit`, and its arguments.

They are written as their authors write them, with axes of their own names, and none knows
of this library.
"""

import functools
import importlib
import itertools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def mesh_of(**sizes) -> Mesh:
    return Mesh(np.array(jax.devices()[:8]).reshape(*sizes.values()), tuple(sizes))


def placed(tree: Any, mesh: Mesh, spec) -> Any:
    """The shapes of a tree, each with a sharding: `spec`, or its value for the path."""

    def place(path, x):
        name = jax.tree_util.keystr(path)
        found: Any = spec(name, x) if callable(spec) else spec
        sharding = NamedSharding(mesh, found)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(place, tree)


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def nnx_mlp():
    """Flax NNX's own first example, data-parallel: modules and an optimizer that mutate."""
    nnx: Any = importlib.import_module("flax.nnx")

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(64, 256, rngs=rngs)
            self.norm = nnx.LayerNorm(256, rngs=rngs)
            self.out = nnx.Linear(256, 16, rngs=rngs)

        def __call__(self, x):
            return self.out(nnx.relu(self.norm(self.linear(x))))

    mesh = mesh_of(data=8)
    with jax.set_mesh(mesh):
        model = Model(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer, x, y):
        def loss_fn(model):
            return ((model(x) - y) ** 2).mean()

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    x, y = placed((floats(64, 64), floats(64, 16)), mesh, P("data"))
    return train_step, (model, optimizer, x, y)


def fsdp_by_hand(gathers: bool = False):
    """Weights split over `shard`, as the batch is; the compiler decides what to move.

    With `gathers`, weights are gathered where they are used, as they should be.
    """
    mesh = mesh_of(shard=8)
    params = {f"w{i}": floats(512, 512) for i in range(3)}
    whole = NamedSharding(mesh, P())

    def loss_fn(params, batch):
        x = batch["x"]
        for weight in params.values():
            if gathers:
                weight = jax.lax.with_sharding_constraint(weight, whole)
            x = jnp.tanh(x @ weight)
        return jnp.mean((x - batch["y"]) ** 2)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, momentum, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        params = jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum)
        split = jax.tree.map(lambda _: NamedSharding(mesh, P("shard")), params)
        constrain = jax.lax.with_sharding_constraint
        return constrain(params, split), constrain(momentum, split), loss

    batch = {"x": floats(1024, 512), "y": floats(1024, 512)}
    params, batch = placed((params, batch), mesh, P("shard"))
    return train_step, (params, params, batch)


def shard_map_pipeline():
    """GPipe by `shard_map`: microbatches go from stage to stage by `ppermute`."""
    mesh = mesh_of(replica=2, pipe=4)
    microbatches = 8

    def forward(weight, xs):
        stage, last = jax.lax.axis_index("pipe"), jax.lax.axis_size("pipe") - 1
        ring = [(i, (i + 1) % (last + 1)) for i in range(last + 1)]

        def tick(carry, t):
            fresh = xs[jnp.clip(t, 0, microbatches - 1)]
            out = jnp.tanh(jnp.where(stage == 0, fresh, carry) @ weight[0])
            return jax.lax.ppermute(out, "pipe", ring), out

        start = jax.lax.pcast(jnp.zeros_like(xs[0]), "pipe", to="varying")
        _, outs = jax.lax.scan(tick, start, jnp.arange(microbatches + 3))
        outs = jnp.where(stage == last, outs[3:], 0.0)
        return jax.lax.psum(outs, "pipe")

    @jax.jit
    def train_step(weights, xs, ys):
        def loss_fn(weights):
            specs = (P("pipe"), P(None, "replica"))
            run = jax.shard_map(
                forward, mesh=mesh, in_specs=specs, out_specs=P(None, "replica")
            )
            return jnp.mean((run(weights, xs) - ys) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(weights)
        return weights - 0.1 * grads, loss

    weights = placed(floats(4, 256, 256), mesh, P("pipe"))
    batch = placed(floats(microbatches, 16, 256), mesh, P(None, "replica"))
    return train_step, (weights, batch, batch)


def optax_mnist():
    """Optax's example of an MLP on MNIST, with its batch split over devices."""
    mesh = mesh_of(batch=8)
    optimizer = optax.adam(1e-3)
    sizes = [784, 128, 128, 10]
    params = {
        f"layer{i}": {"kernel": floats(m, n), "bias": floats(n)}
        for i, (m, n) in enumerate(itertools.pairwise(sizes))
    }

    def net(params, images):
        x = images.reshape(images.shape[0], -1)
        for i in range(3):
            layer = params[f"layer{i}"]
            x = x @ layer["kernel"] + layer["bias"]
            x = jax.nn.relu(x) if i < 2 else x
        return x

    @jax.jit
    def train_step(params, opt_state, batch):
        def loss_fn(params):
            logits = net(params, batch["image"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
            return losses.mean(), (logits.argmax(-1) == batch["label"]).mean()

        (loss, accuracy), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        metrics = {"loss": loss, "accuracy": accuracy}
        return optax.apply_updates(params, updates), opt_state, metrics

    state = placed((params, jax.eval_shape(optimizer.init, params)), mesh, P())
    batch = {
        "image": floats(256, 28, 28, 1),
        "label": jax.ShapeDtypeStruct((256,), jnp.int32),
    }
    return train_step, (*state, placed(batch, mesh, P("batch")))


class LMState(NamedTuple):
    step: Any
    params: Any
    opt_state: Any


_RULES = (
    ("wte", P("mp", "fsdp")),
    ("(wq|wk|wv|w1)", P(None, "fsdp", "mp")),
    ("(wo|w2)", P(None, "mp", "fsdp")),
    ("lm_head", P("fsdp", "mp")),
    (".*", P()),
)


def easy_lm():
    """After EasyLM's train.py: a LLaMA, regular expressions for specs, one `pjit`."""
    mesh = mesh_of(dp=2, fsdp=2, mp=2)
    layers, width, hidden, vocab = 2, 128, 256, 512
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def spec_of(path, x):
        return next(
            spec if x.ndim >= len(spec) else P()
            for pattern, spec in _RULES
            if re.search(pattern, path)
        )

    def constrain(x, *spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def norm(x, scale):
        return x * scale * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)

    def block(x, layer):
        y = norm(x, layer["norm1"])
        q, k, v = (
            (y @ layer[name]).reshape(*y.shape[:2], 4, -1) for name in ("wq", "wk", "wv")
        )
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = constrain(x + y.reshape(x.shape) @ layer["wo"], ("dp", "fsdp"))
        y = jax.nn.silu(norm(x, layer["norm2"]) @ layer["w1"]) @ layer["w2"]
        return constrain(x + y, ("dp", "fsdp")), None

    def loss_fn(params, batch):
        x = constrain(params["wte"][batch["input_tokens"]], ("dp", "fsdp"))
        x, _ = jax.lax.scan(jax.checkpoint(block), x, params["layers"])
        logits = norm(x, params["norm"]) @ params["lm_head"]
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits, batch["target_tokens"]
        )
        return jnp.sum(losses * batch["loss_masks"]) / jnp.sum(batch["loss_masks"])

    def train_step(state, rng, batch):
        rng, _ = jax.random.split(rng)
        batch = jax.tree.map(lambda x: constrain(x, ("dp", "fsdp")), batch)
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        squares = sum(jnp.sum(x**2) for x in jax.tree.leaves(grads))
        metrics = {"loss": loss, "gradient_norm": jnp.sqrt(squares)}
        return LMState(state.step + 1, params, opt_state), rng, metrics

    params = {
        "wte": floats(vocab, width),
        "layers": {
            **{name: floats(layers, width, width) for name in ("wq", "wk", "wv", "wo")},
            "w1": floats(layers, width, hidden),
            "w2": floats(layers, hidden, width),
            **{name: floats(layers, width) for name in ("norm1", "norm2")},
        },
        "norm": floats(width),
        "lm_head": floats(width, vocab),
    }
    tokens = jax.ShapeDtypeStruct((16, 64), jnp.int32)
    step = jax.ShapeDtypeStruct((), jnp.int32)
    state = LMState(step, params, jax.eval_shape(optimizer.init, params))
    state = placed(state, mesh, spec_of)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    whole = NamedSharding(mesh, P())
    jitted = jax.jit(
        train_step,
        in_shardings=(shardings, whole, whole),
        out_shardings=(shardings, whole, whole),
        donate_argnums=(0, 1),
    )
    rng = jax.eval_shape(jax.random.key, 0)
    batch = {"input_tokens": tokens, "target_tokens": tokens, "loss_masks": floats(16, 64)}
    return jitted, (state, rng, batch)


STEPS = {
    make.__name__: make
    for make in (nnx_mlp, fsdp_by_hand, shard_map_pipeline, optax_mnist, easy_lm)
}

#: The collectives of each step along each axis, on any backend.
SENT = {
    "nnx_mlp": {("data", "all-reduce")},
    "shard_map_pipeline": {("pipe", "collective-permute"), ("replica", "all-reduce")},
    "optax_mnist": {("batch", "all-reduce")},
    "easy_lm": {
        ("fsdp", "all-gather"),
        ("fsdp", "reduce-scatter"),
        ("mp", "all-reduce"),
        ("dp", "all-reduce"),
    },
}
