"""Small programs that between them use most of what JAX and its neighbours can do.

Each is a function of a matrix `w` of 4 x 4, which is trained, and of a batch `x` of 8 x 4,
to arrays of any kind.
"""

# The types that other packages declare are narrower than those that they take.
# pyright: reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportFunctionMemberAccess=false

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.scipy as jsp
import jax.scipy.optimize
import jax.scipy.spatial.transform
import lineax
import numpy as np
import optimistix
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas, sparse
from jax.experimental.ode import odeint

KEY = jax.random.key(3)
EYE = np.eye(4, dtype=np.float32)


def spd(w):
    """A positive definite matrix."""
    return w @ w.T + 4 * EYE


def image(w, x):
    """Images of 8 x 8 with 2 channels, a batch of 2."""
    return jnp.tanh(jnp.einsum("bi,ij,cj->bcij", x[:4], w, x[4:])).reshape(2, 2, 8, 8)


def kernel(w, *shape):
    return jnp.cos(jnp.arange(np.prod(shape), dtype=w.dtype) + w.sum()).reshape(shape)


LINALG = {
    "solve": lambda w, x: jnp.linalg.solve(spd(w), x.T),
    "det": lambda w, x: jnp.linalg.det(spd(w)),
    "svd": lambda w, x: jnp.linalg.svd(w)[1],
    "eigh": lambda w, x: jnp.linalg.eigh(spd(w) + jnp.diag(jnp.arange(4.0)))[0],
    "lu_solve": lambda w, x: jsp.linalg.lu_solve(jsp.linalg.lu_factor(spd(w)), x.T),
    "expm": lambda w, x: jsp.linalg.expm(w),
    "batched": lambda w, x: jax.vmap(
        lambda v: jnp.linalg.solve(spd(w) + jnp.outer(v, v), v)
    )(x),
    "tridiagonal_solve": lambda w, x: lax.linalg.tridiagonal_solve(
        x[0], x[1] + 9, x[2], x[:, :1][:4] + w[:, :1]
    ),
    "gaussian_kde": lambda w, x: jsp.stats.gaussian_kde((x @ w).T[:2]).pdf(x.T[:2]),
}
LINALG_VALUES = {
    "schur": lambda w, x: jsp.linalg.schur(spd(w))[0],
    "hessenberg": lambda w, x: jsp.linalg.hessenberg(spd(w)),
    "cholesky_update": lambda w, x: lax.linalg.cholesky_update(spd(w), x[0]),
    "householder": lambda w, x: lax.linalg.householder_product(w, 0.1 * x[0]),
    "tridiagonal": lambda w, x: lax.linalg.tridiagonal(spd(w))[1],
    "roots": lambda w, x: jnp.abs(jnp.roots(w[0], strip_zeros=False)).sum(),
}

ARRAYS = {
    "fft": lambda w, x: jnp.abs(jnp.fft.fft(x @ w)) ** 2,
    "ifftn": lambda w, x: jnp.fft.ifftn(x @ w).real,
    "sort": lambda w, x: jnp.sort(x @ w, axis=0) * jnp.arange(8.0)[:, None],
    "cumulative": lambda w, x: (
        jnp.cumsum(x @ w, 0),
        jnp.cumprod(w),
        lax.cummax(w),
        lax.cummin(w, reverse=True),
        lax.cumlogsumexp(w),
    ),
    "top_k": lambda w, x: lax.top_k(x @ w, 2)[0],
    "approx_max_k": lambda w, x: lax.approx_max_k(x @ w, 2)[0],
    "scatter": lambda w, x: (
        x.at[jnp.array([1, 3])].set(w[:2]).at[2].add(w[0]).at[3, 1].multiply(w[1, 1]),
        w.at[0].min(x[0]).at[1].max(x[1]),
    ),
    "gather": lambda w, x: jnp.take_along_axis(x @ w, jnp.argsort(x, axis=1), axis=1),
    "dynamic": lambda w, x: lax.dynamic_update_slice(
        x, lax.dynamic_slice(w, (jnp.argmax(x[0]), 0), (2, 2)), (1, 1)
    ),
    "complex": lambda w, x: jnp.abs(jnp.exp(1j * w) @ lax.complex(x.T, x.T)) ** 2,
    "precision": lambda w, x: lax.reduce_precision(jnp.tan(w), 8, 10),
    "dtypes": lambda w, x: (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(
        "float32"
    ),
    "ragged_dot": lambda w, x: lax.ragged_dot(
        x, w[None] * x[:2, :1, None], jnp.array([3, 5])
    ),
    "barrier": lambda w, x: lax.optimization_barrier((w, x[0]))[0] ** 2,
    "sparse": lambda w, x: sparse.BCOO.fromdense(w, nse=16) @ x.T,
    "signal": lambda w, x: jsp.signal.fftconvolve(x, w),
    "logsumexp": lambda w, x: jsp.special.logsumexp(x @ w, axis=1),
    "nans": lambda w, x: jnp.nan_to_num(jnp.where(w > 0, w, 0) + jnp.sinc(w)),
}
ARRAY_VALUES = {
    "integers": lambda w, x: (
        jnp.bitwise_xor(n := jnp.round(9 * w).astype(jnp.int32), 5) << 2,
        jnp.bitwise_count(n),
        lax.clz(n),
        n // 3 % 7,
        lax.shift_right_logical(n, 3),
    ),
    "bits": lambda w, x: jnp.unpackbits(lax.bitcast_convert_type(w, jnp.uint8)),
    "reduce_xor": lambda w, x: lax.reduce_xor(w.astype(jnp.int32), axes=(0,)),
    "search": lambda w, x: jnp.searchsorted(jnp.sort(x[0]), w),
    "histogram": lambda w, x: jnp.histogram(x, 4)[0],
    "minimize": lambda w, x: (
        jsp.optimize.minimize(lambda v: jnp.sum((v - w[0]) ** 2), x[0], method="BFGS").x
    ),
    "float8": lambda w, x: w.astype(jnp.float8_e4m3fn).astype(jnp.float32),
}


def _special(name):
    fn = getattr(jsp.special, name)
    return lambda w, x: fn(0.5 + 0.3 * jnp.tanh(w))


_OF_ONE = ("digamma", "erfc", "erfinv", "log_ndtr", "i0", "i1")
SPECIAL = {
    **{name: _special(name) for name in _OF_ONE},
    "betainc": lambda w, x: jsp.special.betainc(1.5, 2.0, jax.nn.sigmoid(w)),
    "gammainc": lambda w, x: jsp.special.gammainc(jnp.exp(w[0]), jnp.exp(x[0])),
    "zeta": lambda w, x: jsp.special.zeta(2.5, 1 + w**2),
    "elementary": lambda w, x: (
        jnp.arctan2(w, x[0]),
        jnp.cbrt(w**2 + 1),
        jnp.log1p(w**2),
        jnp.expm1(w),
        jnp.exp2(w),
        jnp.sinh(w) * jnp.cosh(w) * jnp.arcsinh(w),
        jnp.arctanh(jnp.tanh(w)),
        jnp.arcsin(jnp.sin(w) / 2) + jnp.arccos(jnp.cos(w) / 2) + jnp.arccosh(2 + w**2),
        lax.rsqrt(w**2 + 1) ** 3,
        lax.clamp(-0.5, w, 0.5) + jnp.abs(w) + jnp.sqrt(1 + w**2),
        jnp.hypot(w, 1.0) ** jnp.tanh(w) + jnp.fmod(w, 0.7) + jnp.copysign(w, x[0]),
    ),
}

#: Convolutions of kinds that Equinox's layers are not: options of `conv_general_dilated`.
_CONVOLUTIONS = {
    "transposed": ((3, 2, 3, 3), {"lhs_dilation": (2, 2), "padding": ((2, 2), (1, 3))}),
    "negative_padding": ((3, 2, 3, 3), {"padding": ((-1, 2), (0, -2))}),
    "groups": ((4, 1, 3, 3), {"feature_group_count": 2}),
    "batch_groups": ((4, 2, 3, 3), {"batch_group_count": 2}),
    "wide": ((3, 2, 7, 7), {"padding": ((3, 3), (3, 3))}),
}


def _convolution(shape, options):
    options = {"window_strides": (1, 1), "padding": "VALID", **options}

    def program(w, x):
        kernels = kernel(w, *shape)
        return jnp.sin(lax.conv_general_dilated(image(w, x), kernels, **options))

    return program


def _pool(window, dilation=(1, 1)):
    def program(w, x):
        sizes = (1, 1, *window)
        dilated = {"window_dilation": (1, 1, *dilation)}
        sums = lax.reduce_window(
            image(w, x), 0.0, lax.add, sizes, sizes, "VALID", **dilated
        )
        return sums**2

    return program


CONVOLUTIONS = {
    **{name: _convolution(*each) for name, each in _CONVOLUTIONS.items()},
    "channels_last": lambda w, x: (
        lax.conv_general_dilated(
            image(w, x).transpose(0, 2, 3, 1),
            kernel(w, 3, 3, 2, 4),
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        ** 2
    ),
    "line": lambda w, x: (
        lax.conv(image(w, x).reshape(2, 2, 64), kernel(w, 3, 2, 5), (2,), "SAME") ** 2
    ),
    "volume": lambda w, x: (
        lax.conv(
            image(w, x).reshape(1, 2, 4, 8, 4), kernel(w, 2, 2, 3, 3, 3), (1, 1, 1), "SAME"
        )
        ** 2
    ),
    "half": lambda w, x: lax.conv(
        image(w, x).astype(jnp.bfloat16),
        kernel(w, 3, 2, 3, 3).astype(jnp.bfloat16),
        (1, 1),
        "SAME",
    ).astype(jnp.float32),
    "in_loop": lambda w, x: lax.scan(
        lambda c, _: (lax.conv(c, kernel(w, 2, 2, 3, 3), (1, 1), "SAME") / 9, c.sum()),
        image(w, x),
        length=3,
    ),
    "bias": lambda w, x: jnp.tanh(image(w, x) + w[0, :2, None, None]),
    "means": lambda w, x: jnp.mean(image(w, x), axis=(0, 2, 3)) ** 2,
    "pool_too_large": lambda w, x: _pool((9, 2))(w, x).sum() + w,
    "pool_dilated": _pool((2, 2), (2, 1)),
    "max_pool": lambda w, x: lax.reduce_window(
        image(w, x), -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID"
    ),
    "min_pool": lambda w, x: lax.reduce_window(
        image(w, x), jnp.inf, lax.min, (1, 1, 3, 3), (1, 1, 1, 1), "SAME"
    ),
}
CONVOLUTION_VALUES = {
    "integer_convolution": lambda w, x: lax.conv_general_dilated(
        jnp.round(9 * image(w, x)).astype(jnp.int8),
        jnp.ones((3, 2, 3, 3), jnp.int8),
        (1, 1),
        "SAME",
        preferred_element_type=jnp.int32,
    ),
    "integer_pool": lambda w, x: lax.reduce_window(
        jnp.round(9 * image(w, x)).astype(jnp.int8),
        jnp.int8(0),
        lax.add,
        (1, 1, 2, 2),
        (1, 1, 2, 2),
        "VALID",
    ),
    "product_pool": lambda w, x: lax.reduce_window(
        image(w, x), 1.0, lambda a, b: a * b, (1, 1, 2, 2), (1, 1, 2, 2), "VALID"
    ),
    "reduce": lambda w, x: lax.reduce(x, 0.0, lambda a, b: a + jnp.cos(b) - 1, (0,)),
}


@jax.custom_jvp
def _jvp(x):
    return jnp.sin(x)


_jvp.defjvp(lambda primals, tangents: (_jvp(*primals), 2 * tangents[0]))


@jax.custom_vjp
def _vjp(x):
    return jnp.sin(x)


_vjp.defvjp(lambda x: (_vjp(x), x), lambda x, g: (3 * g * x,))


@jax.custom_batching.custom_vmap
def _custom_vmap(x):
    return jnp.sin(x)


_custom_vmap.def_vmap(lambda size, batched, x: (jnp.sin(x), True))


def _root(w, x):
    solve = lambda f, guess: lax.fori_loop(0, 20, lambda _, v: v - f(v) / 3, guess)  # noqa: E731
    tangent = lambda g, y: y / g(1.0)  # noqa: E731
    return lax.custom_root(lambda v: v**3 + v - w.sum(), 0.5, solve, tangent)


def _linear_solve(w, x):
    matvec = lambda v: spd(w) @ v  # noqa: E731
    solve = lambda mv, b: jsp.sparse.linalg.cg(mv, b)[0]  # noqa: E731
    return lax.custom_linear_solve(matvec, x[0], solve, symmetric=True)


def _kernel(x_ref, out_ref):
    out_ref[...] = jnp.sum(x_ref[...] ** 2, axis=0, keepdims=True)


def _pallas(w, x):
    shape = jax.ShapeDtypeStruct((1, 4), jnp.float32)
    return pallas.pallas_call(_kernel, out_shape=shape, interpret=True)(x)


def _reference(w, x):
    ref = jax.new_ref(w)
    ref[0] = x[0]
    ref[1] = 2 * w[0]
    return ref[...] ** 2


def _checked(w, x):
    """Every check holds."""

    def body(carry, row):
        row = eqx.error_if(row, jnp.any(jnp.isnan(row)), "nan")
        return carry + row @ w, carry.sum()

    return lax.scan(body, eqx.error_if(x[0], x[0, 0] > 1e6, "large"), x)


def _policies(w, x):
    def layer(v):
        v = checkpoint_name(jnp.sin(v @ w), "kept")
        return jnp.cos(v @ w)

    policies = jax.checkpoint_policies
    kept = policies.save_only_these_names("kept"), policies.dots_saveable, None
    return [jax.checkpoint(layer, policy=policy)(x) for policy in kept]


def _per_device(w, x):
    """A function for each device, on the mesh of the step, or on none."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jnp.sum(jnp.tanh(x @ w), axis=0)

    def local(w, x):
        return lax.psum(jnp.sum(jnp.tanh(x @ w), axis=0), ("data", "fsdp"))

    specs = dict(in_specs=(jax.P(), jax.P(("data", "fsdp"))), out_specs=jax.P())
    return jax.shard_map(local, mesh=mesh, **specs)(w, x)


CONTROL_FLOW = {
    "cond": lambda w, x: lax.cond(x[0, 0] > 0, lambda w: jnp.sin(w), lambda w: w**2, w),
    "switch": lambda w, x: lax.switch(
        jnp.argmax(x[0]), [jnp.sin, jnp.cos, jnp.tanh, jnp.exp], w
    ),
    "select": lambda w, x: jax.vmap(
        lambda v: lax.cond(v[0] > 0, lambda v: v @ w, lambda v: w @ v, v)
    )(x),
    "scan": lambda w, x: lax.scan(lambda c, r: (jnp.tanh(c @ w + r), c[0]), x[0], x),
    "reverse_scan": lambda w, x: lax.scan(
        lambda c, r: (jnp.tanh(c @ w + r), c[0]), x[0], x, reverse=True, unroll=2
    ),
    "map": lambda w, x: lax.map(lambda r: jnp.sin(r @ w), x, batch_size=3),
    "associative_scan": lambda w, x: lax.associative_scan(
        jnp.matmul, w[None] * x[:, :1, None]
    ),
    "custom_root": _root,
    "custom_linear_solve": _linear_solve,
    "custom_jvp": lambda w, x: _jvp(w),
    "custom_vjp": lambda w, x: _vjp(w),
    "linear_call": lambda w, x: jax.custom_derivatives.linear_call(
        lambda r, v: r * v, lambda r, v: r * v, x[:4], w
    ),
    "checkpoint": _policies,
    "jit": lambda w, x: jax.jit(lambda w: jnp.sin(w), inline=True)(w) + jax.jit(jnp.cos)(w),
    "odeint": lambda w, x: odeint(
        lambda y, t: jnp.tanh(w @ y), x[0], jnp.linspace(0, 1, 3)
    ),
    "platform": lambda w, x: lax.platform_dependent(w, cpu=jnp.sin, default=jnp.cos),
    "checked": _checked,
    "shard_map": _per_device,
    "dropped": lambda w, x: (w**2, jnp.linalg.inv(w))[0],
}
CONTROL_FLOW_VALUES = {
    "pallas": _pallas,
    "reference": _reference,
    "custom_vmap": lambda w, x: _custom_vmap(w) + jax.vmap(_custom_vmap)(w),
    "while": lambda w, x: jax.jvp(
        lambda w: lax.while_loop(lambda c: c.sum() < 9, lambda c: c * 1.5 + 1, w),
        (w,),
        (w,),
    ),
    "pure_callback": lambda w, x: jax.pure_callback(
        lambda w: np.sin(w), jax.ShapeDtypeStruct(w.shape, w.dtype), w
    ),
    "batched_while": lambda w, x: jax.vmap(
        lambda v: lax.while_loop(lambda c: c[0] < 9, lambda c: c * 1.5 + 1, v)
    )(x),
    "checked_while": lambda w, x: eqx.internal.while_loop(
        lambda c: c.sum() < 9, lambda c: c + 1, w, kind="lax", max_steps=20
    ),
    "constant": lambda w, x: jnp.float32(3),
}


def _sampler(name):
    return lambda w, x: getattr(jax.random, name)(KEY, shape=(3, 5))


RANDOM = {
    **{name: _sampler(name) for name in ("normal", "uniform", "bits")},
    "ball": lambda w, x: jax.random.ball(KEY, 3),
    "binomial": lambda w, x: jax.random.binomial(KEY, 9.0, 0.3, (5,)),
    "categorical": lambda w, x: jax.random.categorical(KEY, x),
    "fold_in": lambda w, x: jax.random.key_data(jax.random.fold_in(KEY, jnp.argmax(x))),
    "gamma": lambda w, x: jax.random.gamma(KEY, jnp.exp(w)),
    "multinomial": lambda w, x: jax.random.multinomial(KEY, 9.0, jax.nn.softmax(x)),
    "orthogonal": lambda w, x: jnp.abs(jax.random.orthogonal(KEY, 3)),
    "permutation": lambda w, x: jax.random.permutation(KEY, x),
    "poisson": lambda w, x: jax.random.poisson(KEY, 3.0, (5,)),
    "rbg": lambda w, x: jax.random.normal(jax.random.key(1, impl="rbg"), (5,)),
    "unsafe_rbg": lambda w, x: jax.random.normal(
        jax.random.key(1, impl="unsafe_rbg"), (5,)
    ),
}


def _lineax(solver, tags=lineax.positive_semidefinite_tag):
    def program(w, x):
        operator = lineax.MatrixLinearOperator(spd(w), tags)
        return lineax.linear_solve(operator, x[0], solver).value

    return program


_TOLERANCES = {"rtol": 1e-5, "atol": 1e-5}
LINEAX = {
    "auto": _lineax(lineax.AutoLinearSolver(well_posed=None)),
    "lineax_qr": _lineax(lineax.QR()),
    "lineax_cg": _lineax(lineax.CG(**_TOLERANCES)),
    "lineax_function": lambda w, x: (
        lineax.linear_solve(
            lineax.FunctionLinearOperator(
                lambda v: spd(w) @ v,
                jax.ShapeDtypeStruct((4,), jnp.float32),
                lineax.positive_semidefinite_tag,
            ),
            x[0],
            lineax.CG(**_TOLERANCES),
        ).value
    ),
}

_ZEROS = np.zeros(4, np.float32)
OPTIMISTIX = {
    "root_find": lambda w, x: (
        optimistix.root_find(
            lambda y, _: y + 0.1 * jnp.tanh(w @ y) - x[0],
            optimistix.Newton(**_TOLERANCES),
            _ZEROS,
        ).value
    ),
    "least_squares": lambda w, x: (
        optimistix.least_squares(
            lambda y, _: spd(w) @ y - x[0],
            optimistix.LevenbergMarquardt(**_TOLERANCES),
            _ZEROS,
        ).value
    ),
    "through_steps": lambda w, x: (
        optimistix.root_find(
            lambda y, _: y + 0.1 * jnp.tanh(w @ y) - x[0],
            optimistix.Chord(**_TOLERANCES),
            _ZEROS,
            adjoint=optimistix.RecursiveCheckpointAdjoint(),
            max_steps=20,
        ).value
    ),
}


def _diffrax(solver, **options):
    def program(w, x):
        term = diffrax.ODETerm(lambda t, y, w: jnp.tanh(w @ y))
        controller = diffrax.PIDController(rtol=1e-4, atol=1e-4)
        return diffrax.diffeqsolve(
            term, solver, 0, 1, 0.1, x[0], w, stepsize_controller=controller, **options
        ).ys

    return program


def _sde(w, x):
    noise = diffrax.VirtualBrownianTree(0.0, 1.0, 1e-2, (), KEY)
    drift = diffrax.ODETerm(lambda t, y, _: jnp.tanh(w @ y))
    diffusion = diffrax.ControlTerm(lambda t, y, _: 0.1 * y, noise)
    terms = diffrax.MultiTerm(drift, diffusion)
    return diffrax.diffeqsolve(terms, diffrax.Euler(), 0, 1, 0.1, x[0]).ys


DIFFRAX = {
    "backsolve": _diffrax(diffrax.Tsit5(), adjoint=diffrax.BacksolveAdjoint()),
    "implicit": _diffrax(diffrax.Kvaerno3()),
    "dense": _diffrax(diffrax.Dopri5(), saveat=diffrax.SaveAt(ts=[0.2, 0.7])),
    "sde": _sde,
}

#: By name: programs that are differentiated, and programs whose values are only computed.
GROUPS = {
    "linalg": (LINALG, LINALG_VALUES),
    "arrays": (ARRAYS, ARRAY_VALUES),
    "special": (SPECIAL, {}),
    "convolutions": (CONVOLUTIONS, CONVOLUTION_VALUES),
    "control flow": (CONTROL_FLOW, CONTROL_FLOW_VALUES),
    "random": ({}, RANDOM),
    "solvers": (LINEAX | OPTIMISTIX | DIFFRAX, {}),
}
