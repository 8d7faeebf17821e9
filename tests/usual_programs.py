"""Programs that people write with JAX, by name, to try whether XLA splits them right.

Each is a function of parameters and of a batch to any array. If its first dim is as long as
the batch, these are rows.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
from jax import lax
from jax.experimental import sparse

ROWS, TIME, WIDTH, CLASSES = 16, 12, 4, 10
KEY = jax.random.key(7)


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of parameters and a batch, and the shapes of the parameters."""

    fn: Callable[[Any, Any], jax.Array]
    shapes: dict[str, tuple[int, ...]]

    def params(self):
        """Small numbers, all different, in float64."""
        return {
            name: np.sin(1.0 + n + np.arange(np.prod(shape, dtype=int))).reshape(shape)
            for n, (name, shape) in enumerate(self.shapes.items())
        }

    def losses(self, params, batch):
        """The losses: one per row, or a scalar."""
        out = jnp.sin(self.fn(params, batch))
        if out.ndim and len(out) == ROWS:
            return out.reshape(ROWS, -1).sum(1)
        return out.sum()


def make_batch(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "row": rng.normal(size=(ROWS, 8)),
        "seq": rng.normal(size=(ROWS, TIME, WIDTH)),
        "image": rng.normal(size=(ROWS, 4, 8, 8)),
        "scalar": rng.normal(size=ROWS),
        "label": rng.integers(0, 8, ROWS).astype(np.int32),
        "tokens": rng.integers(0, CLASSES, (ROWS, TIME)).astype(np.int32),
    }


PROGRAMS: dict[str, Program] = {}


def program(name, fn, **shapes):
    assert name not in PROGRAMS
    PROGRAMS[name] = Program(fn, shapes)


# Convolutions


def conv(x, w, stride=1, padding: Any = "SAME", **options):
    dims = x.ndim - 2
    return lax.conv_general_dilated(x, w, (stride,) * dims, padding, **options)


def channels_first(batch):
    return jnp.swapaxes(batch["seq"], 1, 2)


def by_example(fn):
    """Convolve like `equinox.nn`: one example at a time, under `vmap`."""
    return lambda m, b: jax.vmap(lambda x: fn(m, x[None])[0])(b["image"])


IMAGE = {"w": (6, 4, 3, 3)}
program("conv", lambda m, b: conv(b["image"], m["w"]), **IMAGE)
program("conv by example", by_example(lambda m, x: conv(x, m["w"])), **IMAGE)
program("conv stride", lambda m, b: conv(b["image"], m["w"], 2), **IMAGE)
program("conv valid", lambda m, b: conv(b["image"], m["w"], 1, "VALID"), **IMAGE)
program("conv dilated", lambda m, b: conv(b["image"], m["w"], rhs_dilation=(2, 2)), **IMAGE)
program(
    "conv dilated input",
    lambda m, b: conv(b["image"], m["w"], 1, [(2, 2), (2, 2)], lhs_dilation=(2, 2)),
    **IMAGE,
)
program("conv 1x1", lambda m, b: conv(b["image"], m["w"]), w=(6, 4, 1, 1))
program("conv patches", lambda m, b: conv(b["image"], m["w"], 4, "VALID"), w=(6, 4, 4, 4))
program("conv to 1x1", lambda m, b: conv(b["image"], m["w"], 1, "VALID"), w=(6, 4, 8, 8))
program(
    "conv transposed",
    lambda m, b: lax.conv_transpose(
        b["image"], m["w"], (2, 2), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW")
    ),
    **IMAGE,
)
program(
    "conv channels last",
    lambda m, b: conv(
        jnp.moveaxis(b["image"], 1, -1), m["w"], dimension_numbers=("NHWC", "HWIO", "NHWC")
    ),
    w=(3, 3, 4, 6),
)
program("conv 1d", lambda m, b: conv(channels_first(b), m["w"]), w=(6, 4, 3))
program(
    "conv 1d causal",
    lambda m, b: conv(channels_first(b), m["w"], 1, [(2, 0)]),
    w=(6, 4, 3),
)
program(
    "conv 3d",
    lambda m, b: conv(b["image"].reshape(ROWS, 2, 8, 4, 4), m["w"]),
    w=(3, 2, 3, 3, 3),
)
program(
    "conv of a conv",
    lambda m, b: conv(jnp.tanh(conv(b["image"], m["w"])), m["v"], 2),
    **IMAGE,
    v=(5, 6, 3, 3),
)
program(
    "conv grouped",
    lambda m, b: conv(b["image"], m["w"], feature_group_count=2),
    w=(6, 2, 3, 3),
)
program(
    "conv grouped by example",
    by_example(lambda m, x: conv(x, m["w"], feature_group_count=2)),
    w=(6, 2, 3, 3),
)
program(
    "conv grouped stride",
    lambda m, b: conv(b["image"], m["w"], 2, feature_group_count=4),
    w=(8, 1, 3, 3),
)
program(
    "conv depthwise",
    lambda m, b: conv(b["image"], m["w"], feature_group_count=4),
    w=(4, 1, 3, 3),
)
program(
    "conv depthwise dilated",
    lambda m, b: conv(b["image"], m["w"], feature_group_count=4, rhs_dilation=(2, 2)),
    w=(4, 1, 3, 3),
)
program(
    "conv depthwise 1d causal",
    lambda m, b: conv(channels_first(b), m["w"], 1, [(3, 0)], feature_group_count=4),
    w=(4, 1, 4),
)
program(
    "conv depthwise channels last",
    lambda m, b: conv(
        jnp.moveaxis(b["image"], 1, -1),
        m["w"],
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=4,
    ),
    w=(3, 3, 1, 8),
)
program(
    "conv batch groups",
    lambda m, b: conv(b["image"], m["w"], batch_group_count=4).sum((1, 2, 3)),
    w=(8, 4, 3, 3),
)
program(
    "conv ensemble on one input",
    lambda m, b: jnp.moveaxis(jax.vmap(lambda w: conv(b["image"], w))(m["w"]), 0, 1),
    w=(3, 6, 4, 3, 3),
)
program(
    "conv ensemble on its own inputs",
    lambda m, b: jnp.moveaxis(
        jax.vmap(conv, (1, 0))(jnp.stack([b["image"]] * 3, 1), m["w"]), 0, 1
    ),
    w=(3, 6, 4, 3, 3),
)
program(
    "conv with a kernel for each example",
    lambda m, b: jax.vmap(lambda x, w: conv(x[None], w.reshape(3, 4, 3, 3))[0])(
        b["image"], b["row"] @ m["w"]
    ),
    w=(8, 108),
)
program(
    "conv over the batch",
    lambda m, b: conv(b["row"].T[None], m["w"])[0].T,
    w=(5, 8, 3),
)
program("convolve", lambda m, b: jnp.convolve(b["scalar"], m["w"], "same"), w=(3,))
program(
    "convolve by row",
    lambda m, b: jax.vmap(lambda x: jnp.convolve(x, m["w"]))(b["row"]),
    w=(3,),
)
program(
    "convolve with a row each",
    lambda m, b: jax.vmap(lambda x: jnp.convolve(x * m["w"], x))(b["row"]),
    w=(8,),
)
program("correlate", lambda m, b: jnp.correlate(b["scalar"], m["w"], "full"), w=(5,))
program(
    "convolve 2d",
    lambda m, b: jax.vmap(lambda x: jsp.signal.convolve2d(x[0], m["w"], mode="same"))(
        b["image"]
    ),
    w=(3, 3),
)
program(
    "patches",
    lambda m, b: jnp.einsum(
        "bkhw,ko->bohw",
        lax.conv_general_dilated_patches(b["image"], (3, 3), (1, 1), "SAME"),
        m["w"],
    ),
    w=(36, 2),
)
program(
    "conv, gradient penalty",
    lambda m, b: jax.grad(lambda x: jnp.sum(jnp.tanh(conv(x, m["w"], 2))))(b["image"]),
    **IMAGE,
)


# Scatters and gathers


def scatter(kind, rows=slice(None)):
    """Scatter the rows of a batch to as many rows as there are labels."""

    def fn(m, b):
        into = jnp.ones((8, 8)) * jnp.cos(m["w"])
        at = into.at[b["label"][rows]]
        return getattr(at, kind)(0.3 * b["row"][rows] * m["w"])

    return fn


CUTS = {
    "": slice(None),
    " of all but the last": slice(-1),
    " from the second": slice(1, None),
}
CUTS[" of every second"] = slice(None, None, 2)
for cut, rows in CUTS.items():
    for kind in ("add", "min", "max"):
        program(f"scatter {kind}{cut}", scatter(kind, rows), w=(8,))
    program(
        f"segment_sum{cut}",
        lambda m, b, rows=rows: jax.ops.segment_sum(
            b["row"][rows] * m["w"], b["label"][rows], 8
        ),
        w=(8,),
    )
    program(
        f"lookup{cut}",
        lambda m, b, rows=rows: m["w"][b["label"][rows]],
        w=(CLASSES, WIDTH),
    )
    program(
        f"lookup of tokens{cut}",
        lambda m, b, rows=rows: m["w"][b["tokens"][:, rows]],
        w=(CLASSES, WIDTH),
    )
program(
    "scatter set",
    lambda m, b: jnp.zeros((32, 8)).at[jnp.arange(ROWS) * 2 + 1].set(b["row"] * m["w"]),
    w=(8,),
)
program(
    "scatter add in two dims",
    lambda m, b: (
        jnp.zeros((8, CLASSES)).at[b["label"][:, None], b["tokens"]].add(b["seq"] @ m["w"])
    ),
    w=(WIDTH,),
)
program(
    "scatter by row",
    lambda m, b: jax.vmap(lambda t, x: jnp.zeros(CLASSES).at[t].add(x))(
        b["tokens"], b["seq"] @ m["w"]
    ),
    w=(WIDTH,),
)
program(
    "segment_max",
    lambda m, b: jnp.maximum(jax.ops.segment_max(b["row"] * m["w"], b["label"], 8), -9),
    w=(8,),
)
program(
    "scatter multiply of all but the last, no gradient",
    lambda m, b: (
        m["w"]
        * lax.stop_gradient(jnp.ones((8, 8)).at[b["label"][:-1]].multiply(b["row"][:-1]))
    ),
    w=(8,),
)
program("bincount", lambda m, b: jnp.bincount(b["label"], length=8) * m["w"], w=(8,))
program(
    "bincount with weights",
    lambda m, b: jnp.bincount(b["tokens"].ravel(), (b["seq"] @ m["w"]).ravel(), length=10),
    w=(WIDTH,),
)
program(
    "bincount of all but three",
    lambda m, b: jnp.bincount(b["label"][:-3], (b["row"] @ m["w"])[:-3], length=8),
    w=(8,),
)
program(
    "repeat with counts",
    lambda m, b: jnp.repeat(b["row"] * m["w"], b["label"] % 3, 0, total_repeat_length=20),
    w=(8,),
)
program(
    "histogram",
    lambda m, b: jnp.histogram(b["scalar"], 5, weights=b["row"] @ m["w"])[0],
    w=(8,),
)
program(
    "sparse product",
    lambda m, b: (
        sparse.BCOO(
            (b["row"] @ m["w"], jnp.stack([b["label"], jnp.arange(ROWS) % 5], 1)),
            shape=(8, 5),
        )
        @ m["v"]
    ),
    w=(8,),
    v=(5, 3),
)
program(
    "graph convolution",
    lambda m, b: jax.ops.segment_sum(
        (b["row"] @ m["w"])[b["tokens"].ravel()], jnp.repeat(jnp.arange(ROWS), TIME), ROWS
    ),
    w=(8, 5),
)
program(
    "graph of all edges but the last",
    lambda m, b: jax.ops.segment_sum(
        (b["row"] @ m["w"])[b["tokens"].ravel()[:-1]], b["tokens"].ravel()[1:], ROWS
    ),
    w=(8, 5),
)
program(
    "one-hot product",
    lambda m, b: jax.nn.one_hot(b["tokens"], CLASSES, dtype=jnp.float64) @ m["w"],
    w=(CLASSES, 3),
)
program(
    "take along",
    lambda m, b: jnp.take_along_axis(b["seq"] @ m["w"], b["tokens"][..., None] % 5, 2),
    w=(WIDTH, 5),
)
program("take rows", lambda m, b: (b["row"] * m["w"])[b["label"]], w=(8,))
program("permuted rows", lambda m, b: (b["row"] * m["w"])[jnp.argsort(b["scalar"])], w=(8,))
program("permuted with itself", lambda m, b: b["row"] * (b["row"] @ m["w"])[::-1], w=(8, 8))
program(
    "masked rows",
    lambda m, b: jnp.where(b["label"][:, None] > 3, b["row"] @ m["w"], 0.0),
    w=(8, 3),
)
program(
    "dynamic slice",
    lambda m, b: lax.dynamic_slice_in_dim(b["seq"] @ m["w"], b["label"][0], 3, 1),
    w=(WIDTH, 5),
)
program(
    "dynamic slice of rows",
    lambda m, b: lax.dynamic_slice_in_dim(b["row"] @ m["w"], b["label"][0], 5, 0),
    w=(8, 5),
)
program(
    "dynamic slice by row",
    lambda m, b: jax.vmap(lambda x, i: lax.dynamic_slice_in_dim(x, i, 3))(
        b["seq"] @ m["w"], b["label"]
    ),
    w=(WIDTH, 5),
)
program(
    "dynamic update",
    lambda m, b: lax.dynamic_update_slice(
        b["seq"], b["seq"][:, :2] * m["w"], (np.int32(0), b["label"][0], np.int32(0))
    ),
    w=(WIDTH,),
)
program(
    "dynamic update by row",
    lambda m, b: jax.vmap(
        lambda x, i: lax.dynamic_update_slice_in_dim(x, x[:2] * m["w"], i, 0)
    )(b["seq"], b["label"]),
    w=(WIDTH,),
)

# Slices and joins


def moved(name, fn):
    """A linear layer, then something that moves numbers about."""
    program(name, lambda m, b: fn(b["seq"] @ m["w"]), w=(WIDTH, 5))


moved("cut rows", lambda x: x[:-3])
moved("cut rows on both sides", lambda x: x[1:-2])
moved("every second row", lambda x: x[::2])
moved("differences of rows", lambda x: x[1:] - x[:-1])
moved("differences in time", lambda x: jnp.diff(x, axis=1))
moved("products with shifted rows", lambda x: x[3:] * x[:-3])
moved("rolled rows", lambda x: x * jnp.roll(x, 3, 0))
moved("rolled in time", lambda x: x * jnp.roll(x, 5, 1))
moved("flipped rows", lambda x: x * x[::-1])
moved("flipped in time", lambda x: x * jnp.flip(x, 1))
moved("padded rows", lambda x: jnp.pad(x, ((1, 2), (0, 0), (0, 0)))[:ROWS] * x)
moved("padded in time", lambda x: jnp.pad(x, ((0, 0), (1, 2), (0, 0)), mode="reflect"))
moved("padded by rows around", lambda x: jnp.pad(x, ((2, 1), (0, 0), (0, 0)), mode="wrap"))
moved("joined rows", lambda x: jnp.concatenate([x, jnp.tanh(x[:5])])[2:18])
moved("joined features", lambda x: jnp.concatenate([x, jnp.tanh(x), x[..., :1]], -1))
moved("stacked", lambda x: jnp.stack([x, jnp.tanh(x)], 1))
moved("interleaved rows", lambda x: jnp.stack([x, jnp.tanh(x)], 1).reshape(32, -1)[:19])
moved("tiled", lambda x: jnp.tile(x, (2, 1, 1))[5:21])
moved("repeated", lambda x: jnp.repeat(x, 3, 0)[7:29])
moved("rows and time as one", lambda x: jnp.tanh(x.reshape(-1, 5))[3:-4])
moved("split in unequal parts", lambda x: sum(p.sum(0) ** 2 for p in jnp.split(x, [3, 10])))
moved("transposed", lambda x: jnp.einsum("bti,cti->bc", x, jnp.transpose(x, (0, 1, 2))))
moved("triangles", lambda x: jnp.triu(x) - jnp.tril(x, -2))
moved("kron", lambda x: jnp.kron(x[:3, 0], x[4:6, 1]))
moved(
    "microbatches", lambda x: lax.map(lambda y: jnp.tanh(y).sum(0), x.reshape(4, 4, 12, 5))
)

# Reductions

moved("sum of odd rows", lambda x: jnp.sum(jnp.tanh(x[:13])))
moved("mean of odd rows", lambda x: jnp.mean(x[:11] ** 2, (0, 1)))
moved("variance", lambda x: jnp.var(x, (0, 1)))
moved("max", lambda x: jnp.max(x, 0))
moved("product", lambda x: jnp.prod(jnp.tanh(x), 0))
moved("logsumexp of rows", lambda x: jax.nn.logsumexp(x, (0, 1)))
moved("norm", lambda x: jnp.linalg.norm(x[:9]))
moved("argmax, looked up", lambda x: jnp.take_along_axis(x, jnp.argmax(x, 0)[None], 0))
moved("centered", lambda x: x - x.mean(0))
moved("of some rows", lambda x: jnp.sum(x, where=(jnp.arange(ROWS) % 3 > 0)[:, None, None]))
moved("trapezoid", lambda x: jnp.trapezoid(x, axis=0))
moved("median", lambda x: jnp.median(x, 0))
moved("quantile", lambda x: jnp.quantile(x, 0.3, axis=0))
moved("correlations", lambda x: jnp.corrcoef(x[:, 0], rowvar=False))
moved("covariance", lambda x: jnp.cov(x[:, 0].T))

# Windows, sorts, cumulative operations


def window(op, start, size, stride, padding="VALID"):
    return lambda m, b: lax.reduce_window(
        conv(b["image"], m["w"]), start, op, (1, 1, *size), (1, 1, *stride), padding
    )


POOLED = {"w": (4, 4, 1, 1)}
program("max pool", window(lax.max, -jnp.inf, (2, 2), (2, 2)), **POOLED)
program(
    "max pool that overlaps", window(lax.max, -jnp.inf, (3, 3), (2, 2), "SAME"), **POOLED
)
program("average pool", window(lax.add, 0.0, (2, 2), (2, 2)), **POOLED)
program(
    "average pool that overlaps", window(lax.add, 0.0, (3, 3), (1, 1), "SAME"), **POOLED
)
program("min pool", window(lax.min, jnp.inf, (3, 2), (1, 2)), **POOLED)
moved(
    "moving sum of rows",
    lambda x: lax.reduce_window(x, 0.0, lax.add, (3, 1, 1), (1, 1, 1), "SAME"),
)
moved(
    "moving max of rows",
    lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (3, 1, 1), (2, 1, 1), "VALID"),
)
moved("sorted features", lambda x: jnp.sort(x, -1) * jnp.arange(5.0))
moved("sorted rows", lambda x: jnp.sort(x, 0) * jnp.cos(jnp.arange(5.0)))
moved("argsort of rows", lambda x: jnp.take_along_axis(x, jnp.argsort(-x, 0), 0)[:7])
moved("sort by keys", lambda x: lax.sort((x, jnp.tanh(x)), dimension=0, num_keys=1)[1])
moved("top k", lambda x: lax.top_k(x, 2)[0])
moved("top k of rows", lambda x: lax.top_k(x.T, 3)[0])
moved("searchsorted", lambda x: x * jnp.searchsorted(jnp.sort(x[:, 0, 0]), x))
moved("cumsum of rows", lambda x: jnp.tanh(jnp.cumsum(x, 0)))
moved("cumsum in time", lambda x: jnp.tanh(jnp.cumsum(x, 1)))
moved("cumprod of rows", lambda x: jnp.cumprod(1 + 0.1 * jnp.tanh(x), 0))
moved("cummax", lambda x: lax.cummax(x, 0))
moved("cumlogsumexp", lambda x: lax.cumlogsumexp(x, 0, reverse=True))
moved(
    "associative scan",
    lambda x: lax.associative_scan(
        lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (jnp.tanh(x), x), axis=1
    )[1],
)
moved(
    "associative scan of rows",
    lambda x: lax.associative_scan(
        lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (jnp.tanh(x), x), axis=0
    )[1],
)

# Linear algebra


def algebra(name, fn):
    """Linear algebra of symmetric positive matrices, one for each row."""

    def of_rows(m, b):
        x = b["seq"][:, :WIDTH] @ m["w"]
        return fn(x @ jnp.swapaxes(x, 1, 2) + 2 * jnp.eye(WIDTH), x)

    program(name, of_rows, w=(WIDTH, WIDTH))


algebra("cholesky", lambda a, x: jnp.linalg.cholesky(a))
algebra("solve", lambda a, x: jnp.linalg.solve(a, x))
algebra("triangular solve", lambda a, x: jsp.linalg.solve_triangular(a, x, lower=True))
algebra("qr", lambda a, x: jnp.abs(jnp.linalg.qr(a)[1]))
algebra("singular values", lambda a, x: jnp.linalg.svd(a, compute_uv=False))
algebra("eigenvalues", lambda a, x: jnp.linalg.eigvalsh(a))
algebra("inverse", lambda a, x: jnp.linalg.inv(a))
algebra("determinant", lambda a, x: jnp.linalg.slogdet(a)[1])
algebra("exponential", lambda a, x: jsp.linalg.expm(0.1 * x))
algebra("power", lambda a, x: jnp.linalg.matrix_power(jnp.tanh(x), 3))
program(
    "least squares",
    lambda m, b: jnp.linalg.lstsq(b["row"] + m["w"], b["scalar"])[0],
    w=(8,),
)
program(
    "solve with all rows",
    lambda m, b: jnp.linalg.solve(b["row"].T @ b["row"] + jnp.eye(8), m["w"]),
    w=(8, 3),
)
program(
    "kernel of all rows",
    lambda m, b: jnp.linalg.cholesky(
        jnp.exp(-jnp.sum(((b["row"] * m["w"])[:, None] - b["row"] * m["w"]) ** 2, -1))
        + 0.1 * jnp.eye(ROWS)
    ),
    w=(8,),
)

# Random numbers

moved("noise", lambda x: x * jax.random.normal(KEY, x.shape, x.dtype))
moved("noise of odd rows", lambda x: x[:13] * jax.random.uniform(KEY, (13, 1, 1), x.dtype))
moved(
    "dropout by row",
    lambda x: jax.vmap(
        lambda x, key: jnp.where(jax.random.bernoulli(key, 0.7, x.shape), x, 0)
    )(x, jax.random.split(KEY, ROWS)),
)
moved("shuffled rows", lambda x: x * jax.random.permutation(KEY, x))
moved("chosen rows", lambda x: jax.random.choice(KEY, x, (11,)))
moved("categorical", lambda x: x * jax.random.categorical(KEY, x, -1)[..., None])
moved("gumbel", lambda x: jax.nn.softmax(x + jax.random.gumbel(KEY, x.shape, x.dtype)))

# Control flow and recurrences


def gru(m, b):
    def step(h, x):
        z = jax.nn.sigmoid(h @ m["uz"] + x @ m["wz"])
        r = jax.nn.sigmoid(h @ m["ur"] + x @ m["wr"])
        h = (1 - z) * h + z * jnp.tanh((r * h) @ m["uh"] + x @ m["wh"])
        return h, h

    return step


GATES = {
    f"{kind}{gate}": (6 if kind == "u" else WIDTH, 6) for kind in "uw" for gate in "zrh"
}
program(
    "gru",
    lambda m, b: lax.scan(gru(m, b), jnp.zeros((ROWS, 6)), b["seq"].swapaxes(0, 1))[0],
    **GATES,
)
program(
    "gru by example",
    lambda m, b: jax.vmap(lambda x: lax.scan(gru(m, b), jnp.zeros(6), x)[1])(b["seq"]),
    **GATES,
)
program(
    "gru backwards, remat",
    lambda m, b: jax.vmap(
        lambda x: lax.scan(jax.checkpoint(gru(m, b)), jnp.zeros(6), x, reverse=True)[1]
    )(b["seq"]),
    **GATES,
)
program(
    "scan over rows",
    lambda m, b: lax.scan(
        lambda h, x: (h := jnp.tanh(h @ m["w"] + x), h), jnp.zeros(8), b["row"]
    )[1],
    w=(8, 8),
)
program(
    "scan over layers",
    lambda m, b: lax.scan(lambda h, w: (jnp.tanh(h @ w), None), b["row"], m["w"])[0],
    w=(3, 8, 8),
)
program(
    "linear recurrence",
    lambda m, b: lax.scan(
        lambda h, x: (h := jnp.tanh(m["w"]) * h + x, h),
        jnp.zeros((ROWS, WIDTH)),
        b["seq"].swapaxes(0, 1),
    )[1].sum(0),
    w=(WIDTH,),
)
program(
    "cond of a sum",
    lambda m, b: lax.cond(
        jnp.sum(b["scalar"]) > 0, lambda x: jnp.tanh(x), lambda x: x**2, b["row"] @ m["w"]
    ),
    w=(8, 3),
)
program(
    "cond by row",
    lambda m, b: jax.vmap(
        lambda x, i: lax.cond(
            i > 3, lambda x: jnp.tanh(x @ m["w"]), lambda x: x @ m["v"], x
        )
    )(b["row"], b["label"]),
    w=(8, 3),
    v=(8, 3),
)
program(
    "switch by row",
    lambda m, b: jax.vmap(
        lambda x, i: lax.switch(i % 3, [jnp.sin, jnp.cos, jnp.tanh], x @ m["w"])
    )(b["row"], b["label"]),
    w=(8, 3),
)
program(
    "fori loop",
    lambda m, b: lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ m["w"] + i), b["row"]),
    w=(8, 8),
)
program(
    "map over rows",
    lambda m, b: lax.map(lambda x: jnp.tanh(x @ m["w"]), b["row"], batch_size=4),
    w=(8, 3),
)
program(
    "while, no gradient",
    lambda m, b: (
        (b["row"] @ m["w"])
        * lax.stop_gradient(
            lax.while_loop(
                lambda x: jnp.max(x) > 0.1,
                lambda x: 0.5 * jnp.abs(x),
                jnp.abs(b["row"][:, :1]),
            )
        )
    ),
    w=(8, 3),
)
program(
    "sinkhorn over rows",
    lambda m, b: lax.fori_loop(
        0,
        3,
        lambda i, x: jax.nn.log_softmax(jax.nn.log_softmax(x, 0), 1),
        b["row"] @ m["w"],
    ),
    w=(8, 5),
)

# Products, attention, norms

EINSUMS = {
    "bi,ij,bj->b": (8, 8),
    "bi,ijk,bk->bj": (8, 3, 8),
    "bi,io->bo": (8, 3),
    "bi,cj,ij->bc": (8, 8),
    "bi,bj,ijk->k": (8, 8, 3),
}
for text, shape in EINSUMS.items():
    terms = text.split("->")[0].split(",")
    program(
        f"einsum {text}",
        lambda m, b, text=text, terms=terms: jnp.einsum(
            text, *(m["w"] if "b" not in t and "c" not in t else b["row"] for t in terms)
        ),
        w=shape,
    )
for text in ("bti,io->bto", "bti,bsi,io->btso", "bti,bto,io->b", "bti,cti,io->bco"):
    program(
        f"einsum {text}",
        lambda m, b, text=text: jnp.einsum(
            text, *[b["seq"]] * (text.split("->")[0].count(",")), m["w"]
        ),
        w=(WIDTH, WIDTH),
    )
program("low rank", lambda m, b: b["row"] @ (m["w"] @ m["v"]) @ m["w"], w=(8, 2), v=(2, 8))
program(
    "multi dot",
    lambda m, b: jnp.linalg.multi_dot([b["row"], m["w"], m["v"]]),
    w=(8, 5),
    v=(5, 2),
)
program(
    "ragged dot",
    lambda m, b: lax.ragged_dot(b["row"], m["w"], jnp.array([3, 8, 5], jnp.int32)),
    w=(3, 8, 5),
)
program(
    "pairs of rows",
    lambda m, b: jax.nn.log_softmax((b["row"] @ m["w"]) @ (b["row"] @ m["v"]).T).diagonal(),
    w=(8, 3),
    v=(8, 3),
)
program(
    "distances of rows",
    lambda m, b: jnp.sum(jnp.abs((b["row"] @ m["w"])[:, None] - b["row"] @ m["w"]), (1, 2)),
    w=(8, 3),
)


def attention(x, mask=None):
    scores = jnp.einsum("bti,bsi->bts", x, jnp.tanh(x))
    scores = scores if mask is None else jnp.where(mask, scores, -1e9)
    return jax.nn.softmax(scores) @ x


moved("attention", attention)
moved("causal attention", lambda x: attention(x, jnp.tril(jnp.ones((TIME, TIME), bool))))
moved("attention over rows", lambda x: attention(x.swapaxes(0, 1)))
moved("layer norm", lambda x: jax.nn.standardize(x))
moved("batch norm", lambda x: (x - x.mean((0, 1))) / jnp.sqrt(x.var((0, 1)) + 1e-3))
moved("group norm", lambda x: jax.nn.standardize(x.reshape(ROWS, 3, -1)))
program(
    "batch norm of a conv",
    lambda m, b: jax.nn.standardize(conv(b["image"], m["w"], 2), (0, 2, 3)),
    **IMAGE,
)
program(
    "cross entropy",
    lambda m, b: (
        -jnp.take_along_axis(jax.nn.log_softmax(b["row"] @ m["w"]), b["label"][:, None], 1)[
            :, 0
        ]
    ),
    w=(8, 8),
)
program(
    "language model",
    lambda m, b: (
        -jnp.take_along_axis(
            jax.nn.log_softmax(jnp.tanh(m["w"][b["tokens"][:, :-1]]) @ m["w"].T),
            b["tokens"][:, 1:, None],
            2,
        )[..., 0]
    ),
    w=(CLASSES, WIDTH),
)
program(
    "lookup of next tokens",
    lambda m, b: m["w"][b["tokens"].ravel()[:-1]] * m["v"][b["tokens"].ravel()[1:]],
    w=(CLASSES, WIDTH),
    v=(CLASSES, WIDTH),
)
program("fft", lambda m, b: jnp.abs(jnp.fft.fft(b["seq"] @ m["w"], axis=1)), w=(WIDTH, 3))
program(
    "fft of rows", lambda m, b: jnp.abs(jnp.fft.rfft(b["row"] @ m["w"], axis=0)), w=(8, 3)
)
program(
    "complex",
    lambda m, b: jnp.abs(jnp.exp(1j * b["row"]) @ m["w"].astype(complex)),
    w=(8, 3),
)
program(
    "resized",
    lambda m, b: jax.image.resize(conv(b["image"], m["w"]), (ROWS, 4, 11, 5), "bilinear"),
    **POOLED,
)
program(
    "interpolated",
    lambda m, b: jnp.interp(b["row"], jnp.arange(8.0) / 4 - 1, m["w"]),
    w=(8,),
)
program(
    "map_coordinates",
    lambda m, b: jax.vmap(
        lambda x, r: jsp.ndimage.map_coordinates(x[0], [r[:4] + 3 + m["w"], r[4:] + 3], 1)
    )(b["image"], b["row"]),
    w=(4,),
)
