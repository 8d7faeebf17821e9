"""Prints the products, and sums of products, that this machine's CPUs get wrong.

In a process of its own: XLA reads its flags once, and when it is wrong, it may crash.
Each product is a program of its own, because one that has two uses is not fused.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqxshard

jax.config.update("jax_enable_x64", True)

MESH = eqxshard.make_mesh(devices=jax.devices()[:1])
TOLERANCES = {"float32": 1e-4, "float64": 1e-10, "bfloat16": 3e-2}
#: By rank: the shapes of two factors. XLA leaves small ones to its own code.
SHAPES = {
    2: ((256, 64), (64, 64)),
    3: ((40, 33, 64), (64, 48)),
    5: ((4, 2, 3, 33, 20), (3, 20, 48)),
    7: ((4, 2, 2, 2, 2, 33, 20), (2, 2, 20, 24)),
}
#: By name: from a product to any array, in JAX or NumPy.
SUMS = {
    "product": lambda x, numpy: x,
    "sum": lambda x, numpy: numpy.sum(x),
    "mean": lambda x, numpy: numpy.mean(x),
    "max": lambda x, numpy: numpy.max(x),
    "sums": lambda x, numpy: numpy.sum(x, -1),
    "squares": lambda x, numpy: numpy.mean(numpy.sum(x**2, -1)),
}


def factors(rank, dtype, kind="parameter"):
    """Two arrays, of which the second may be the same number everywhere."""
    rng = np.random.default_rng(rank)
    x, w = (rng.uniform(0.5, 1.5, shape) for shape in SHAPES[rank])
    return x.astype(dtype), (w if kind == "parameter" else np.full_like(w, 0.75)).astype(
        dtype
    )


def multiply(kind, model, x):
    if kind == "parameter":
        return x @ model["w"]
    return x @ jnp.full(model["w"].shape, 0.75, x.dtype)


def new_state(weights):
    return eqxshard.init_state(
        lambda key: jax.tree.map(jnp.asarray, weights),
        optax.sgd(1.0),
        key=jax.random.key(0),
        mesh=MESH,
        rule=eqxshard.replicate(),
    )


def check(name, out, expected, dtype="float32"):
    out, expected = np.asarray(out, np.float64), np.asarray(expected)
    worst = np.max(np.abs(out - expected)) / np.max(np.abs(expected))
    if not worst < TOLERANCES[dtype]:
        print(f"{name}: off by {worst:.2g}", flush=True)


def check_evaluations():
    """Check products of the batch with a constant, and with parameters."""
    cases = itertools.product(("constant", "parameter"), TOLERANCES, SHAPES, SUMS)
    # Each property meets most others in one of these.
    for kind, dtype, rank, how in [*cases][::7]:
        x, w = factors(rank, dtype, kind)
        state = new_state({"w": w})

        def metric(model, batch, kind=kind, how=how):
            product = multiply(kind, model, batch["x"])
            return {"value": jnp.mean(SUMS[how](product, jnp).astype(jnp.float32))}

        found = eqxshard.make_eval_step(metric)(state.model, {"x": x}).compute()["value"]
        expected = np.mean(SUMS[how](x.astype(np.float64) @ w.astype(np.float64), np))
        loosest = dtype if dtype == "bfloat16" else "float32"
        check(f"evaluation, {dtype}, {kind}, {how}, rank {rank}", found, expected, loosest)


def check_rows():
    """Check products of many rows with a small matrix each."""
    rows = np.zeros((40_000, 3), np.float32)
    rows[:, 0] = np.arange(40_000) / 1000
    state = new_state({"w": np.eye(3, dtype=np.float32)})
    metric = eqxshard.make_eval_step(
        lambda model, batch: {
            "value": jax.vmap(lambda row: jnp.sum((model["w"] @ row) ** 2))(batch["x"])
        }
    )
    expected = np.mean(rows[:, 0].astype(np.float64) ** 2)
    check(
        "evaluation of rows", metric(state.model, {"x": rows}).compute()["value"], expected
    )


def check_predictions():
    for rank, how in (2, "sums"), (3, "product"), (7, "sums"), (7, "product"):
        x, _ = factors(rank, "float32")
        loader = eqxshard.Loader(
            eqxshard.data.ArraySource({"x": x}), batch_size=len(x), mesh=MESH, shuffle=False
        )
        for kind in ("constant", "parameter"):
            _, w = factors(rank, "float32", kind)
            state = new_state({"w": w})

            def predict(model, batch, kind=kind, how=how):
                return SUMS[how](multiply(kind, model, batch["x"]), jnp)

            out = eqxshard.predict(state.model, predict, loader)
            expected = SUMS[how](x.astype(np.float64) @ w.astype(np.float64), np)
            check(f"prediction, {kind}, {how}, rank {rank}", out, expected)


def check_sums_of_products():
    """Check elementwise products of rank 7, which XLA computes as products of matrices."""
    shape = (3, 1, 2, 2, 8, 8, 8)
    rng = np.random.default_rng(0)
    x, w = (rng.uniform(0.5, 1.5, shape).astype(np.float32) for _ in range(2))
    loader = eqxshard.Loader(
        eqxshard.data.ArraySource({"x": x}), batch_size=3, mesh=MESH, shuffle=False
    )
    state = new_state({"w": w})
    out = eqxshard.predict(
        state.model, lambda model, batch: jnp.sum(batch["x"] * model["w"], 3), loader
    )
    check("sum of products", out, np.sum(x.astype(np.float64) * w, 3))


def check_steps():
    """Check losses, and gradients of scales, which sum products."""
    for rank, how in (2, "mean"), (3, "squares"), (5, "mean"):
        x, w = factors(rank, "float32", "constant")
        state = new_state({"scale": np.ones(x.shape[-1], np.float32)})

        def loss_fn(model, batch, key, how=how, shape=w.shape):
            product = (batch["x"] * model["scale"]) @ jnp.full(shape, 0.75, jnp.float32)
            return SUMS[how](product, jnp)

        step = eqxshard.make_train_step(loss_fn, optax.sgd(1.0), lint="off")
        state, metrics = step(state, {"x": x})
        x, w = x.astype(np.float64), w.astype(np.float64)
        product = x @ w
        check(f"loss, {how}, rank {rank}", metrics["loss"], SUMS[how](product, np))
        slope = np.full(product.shape, 1 / product.size)
        if how == "squares":
            slope = 2 * product / (product.size / product.shape[-1])
        over = tuple(range(x.ndim - 1))
        gradient = np.sum(x * (slope @ np.swapaxes(w, -1, -2)), over)
        scale = np.asarray(state.model["scale"], np.float64)
        check(f"gradient, {how}, rank {rank}", 1 - scale, gradient)


def check_initial_values():
    """Check a mean of products of constants, and of random numbers."""
    state = eqxshard.init_state(
        lambda key: {
            "ones": jnp.mean(jnp.ones((256, 64)) @ jnp.ones((64, 64))) / 64,
            "random": jnp.mean(jax.random.uniform(key, (256, 64)) @ jnp.ones((64, 64))),
        },
        optax.sgd(1.0),
        key=jax.random.key(0),
        mesh=MESH,
        rule=eqxshard.replicate(),
    )
    uniform = np.asarray(jax.random.uniform(jax.random.key(0), (256, 64)))
    check("initial ones", state.model["ones"], 1)
    check("initial means", state.model["random"], np.mean(uniform) * 64)


check_evaluations()
check_rows()
check_predictions()
check_sums_of_products()
check_steps()
check_initial_values()
print("done")
