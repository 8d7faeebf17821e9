"""`plan` and `plan_step`: the needs of a step, before there are devices."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import PyTree

from ..sharding._rule import Rule
from ..training._precision import Precision
from ..training._update import Nonfinite
from ._child import run
from ._lower import find_place, lower_any, lower_ours
from ._plan import Plan
from ._targets import Compiler, Target


def plan(
    make_model: Callable[[Any], PyTree],
    loss_fn: Callable[..., Any],
    optim: optax.GradientTransformation,
    batch: PyTree,
    *,
    mesh_shape: Mapping[str, int],
    rule: Rule,
    target: str | Target = "h200",
    devices: int | None = None,
    backend: Compiler | None = None,
    trainable: PyTree = True,
    precision: Precision | None = None,
    accumulate: int = 1,
    nonfinite: Nonfinite = "skip",
    grad_norms: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
    explicit: bool | Sequence[str] = False,
) -> Plan:
    """Plan a training step on devices that are not there: memory, communication and time.

    The very step of [`eqxshard.make_train_step`][] is traced and lowered here. A process
    of its own compiles it for these devices, and reads its memory, its communication and
    its arithmetic. The time is predicted twice: as the least that a step can take, from the
    peaks of the target, and as the time to expect, from how much of its peaks steps reach.

    **Arguments:**

    - `make_model`, `optim`, `rule`, `trainable`, `precision`: as for
        [`eqxshard.init_state`][]. The mesh that the rule gets is a
        `jax.sharding.AbstractMesh`, which has no devices.
    - `loss_fn`, `accumulate`, `nonfinite`, `grad_norms`, `compiler_options`: as for
        [`eqxshard.make_train_step`][].
    - `batch`: a batch of all devices, of arrays or `jax.ShapeDtypeStruct`s.
    - `mesh_shape`: the sizes of mesh axes, such as `{"data": 8, "fsdp": 64}`. One of them
        may be `-1`, if `devices` is given.
    - `target`: `a100`, `h100`, `h200`, `b200`, `b300`, `gb200`, `tpu-v4`, `tpu-v5e`,
        `tpu-v5p`, `tpu-v6e`, `cpu`, or an [`eqxshard.planning.Target`][].
    - `devices`: the number of devices, by default the product of the mesh's axes.
    - `backend`: the compiler: `gpu`, `tpu` or `cpu`. By default that of the target, if
        it is installed, and else `cpu`: then communication is guessed from the partitioned
        step, and temporaries are an upper estimate.
    - `explicit`: the axes that are Explicit, as for [`eqxshard.make_mesh`][], for a model
        that is written for such axes.

    **Returns:**

    An [`eqxshard.planning.Plan`][], which prints as tables.

    **Raises:**

    `ValueError` if the target is not known, the devices do not divide over the mesh or
    over hosts, the backend is not installed, or the step calls the host and is planned
    for other devices; whatever making the state and the step raises; `RuntimeError` if the
    compiler fails.

    !!! Example

        ```python
        tokens = jax.ShapeDtypeStruct((512, 8192), jnp.int32)
        print(
            eqxshard.plan(
                make_model,
                loss_fn,
                optax.adamw(1e-4),
                {"tokens": tokens, "targets": tokens},
                mesh_shape={"data": 8, "fsdp": 8, "tensor": 8},
                rule=rule,
                precision=eqxshard.Precision("bfloat16"),
                target="h200",
            )
        )
        ```
    """
    place = find_place(mesh_shape, target, devices, backend)
    request = lower_ours(
        place,
        make_model,
        loss_fn,
        optim,
        batch,
        rule=rule,
        trainable=trainable,
        precision=precision,
        explicit=explicit,
        accumulate=accumulate,
        nonfinite=nonfinite,
        grad_norms=grad_norms,
        compiler_options=compiler_options,
    )
    return run(request)


def plan_step(
    fn: Callable[..., Any] | jax.stages.Lowered,
    /,
    *args: Any,
    mesh: Mesh | AbstractMesh | None = None,
    target: str | Target | None = None,
    backend: Compiler | None = None,
    **kwargs: Any,
) -> Plan:
    """Plan any jitted function on devices that are not there, and lint it.

    The function may be anyone's: of plain JAX, Flax, Haiku or another trainer, with
    `shard_map` or without. It is traced and lowered here, for as many devices as its
    arguments and its mesh have, which may be simulated, and compiled for the target in a
    process of its own.

    **Arguments:**

    - `fn`: a function that `jax.jit` returned, or one with the same methods `trace` or
        `lower`, such as those of `nnx.jit` and `eqx.filter_jit`; any other is compiled by
        `jax.jit`. Or the result of its `lower`: then lint reads only the compiled text.
    - `args`, `kwargs`: its arguments: arrays, or `jax.ShapeDtypeStruct`s with the shardings
        that the arrays would have (`eqx.filter_jit` takes only arrays).
    - `mesh`: the mesh to trace it under, for functions and arguments that name only axes.
        A `jax.sharding.AbstractMesh` plans for more devices than there are here.
    - `target`: as for [`eqxshard.plan`][]; by default, the kind of the devices at hand.
    - `backend`: as for [`eqxshard.plan`][].

    **Returns:**

    An [`eqxshard.planning.Plan`][], which prints as tables. Its memory is listed by
    argument of the function, and its arrays are all arrays that the function takes.

    **Raises:**

    Whatever the function raises when it is traced; `TypeError` if `fn` is no function, or
    `devices=` is given and it has no such argument; `ValueError` if the target is not
    known, its devices are not whole hosts, the backend is not installed, or the function
    calls the host and is planned for other devices; `RuntimeError` if the compiler fails.

    !!! Example

        ```python
        step = jax.jit(train_step, donate_argnums=(0, 1))
        print(eqxshard.plan_step(step, params, opt_state, batch, target="h200"))
        ```
    """
    request = lower_any(fn, args, kwargs, mesh=mesh, target=target, backend=backend)
    return run(request)
