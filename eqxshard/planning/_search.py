"""`plan_search`: plans of a step on several meshes, the best first."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import product
from typing import Any

import optax
from jaxtyping import PyTree

from .._errors import UsageError
from ..sharding._mesh import used_axes
from ..sharding._rule import Rule
from ..sharding._text import comma_list, did_you_mean, format_mesh
from ..training._precision import Precision
from ..training._update import Nonfinite
from ._backends import find_backend
from ._child import CompilerError, Request, run
from ._lower import find_place, lower_ours
from ._plan import Plan
from ._targets import Compiler, Target

_LOG = logging.getLogger(__name__)

#: The axes that a search may make larger than 1.
_SEARCHED = ("data", "fsdp", "context", "tensor")

#: The most devices that `tensor` and `context` span, where hosts are larger.
_MOST_WITHIN = 8


def plan_search(
    make_model: Callable[[Any], PyTree],
    loss_fn: Callable[..., Any],
    optim: optax.GradientTransformation,
    batch: PyTree,
    *,
    devices: int,
    rule: Rule,
    target: str | Target = "h200",
    meshes: Sequence[Mapping[str, int]] | None = None,
    axes: Sequence[str] = ("data", "fsdp", "tensor"),
    backend: Compiler | None = None,
    trainable: PyTree = True,
    precision: Precision | None = None,
    accumulate: int = 1,
    nonfinite: Nonfinite = "skip",
    grad_norms: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
    workers: int = 4,
) -> list[Plan]:
    """Plans of a training step on several meshes of devices that are not there.

    **Arguments:**

    - `make_model`, `loss_fn`, `optim`, `batch`, `rule`, `target`, `backend`, `trainable`,
        `precision`, `accumulate`, `nonfinite`, `grad_norms`, `compiler_options`: as for
        `plan`.
    - `devices`: the number of devices.
    - `meshes`: the mesh shapes to plan. By default, those of `axes` whose `tensor` and
        `context` stay within 8 devices of a host; beyond one host, `fsdp` goes over whole
        hosts.
    - `axes`: the axes of these meshes: some of `data`, `fsdp`, `context` and `tensor`.
    - `workers`: how many meshes to compile for at a time. Each takes a core, and for a
        large model a few GB of memory.

    **Returns:**

    The plans. Those that fit come first, the fastest of them at the top; then the others,
    by the memory that they need. A mesh that the step cannot run on, because the batch or
    the model does not divide over it, or because the compiler fails, is left out, and the
    reason is logged.

    **Raises:**

    `ValueError` if an argument is invalid, such as a mesh of another number of devices;
    what `plan` raises for the first mesh, if the step can run on none of them; and any
    other error of the model or the loss function, even if it occurs on one mesh only.

    !!! Example

        ```python
        plans = eqxshard.plan_search(
            make_model,
            loss_fn,
            optax.adamw(1e-4),
            {"tokens": tokens, "targets": tokens},
            devices=64,
            rule=rule,
            target="h200",
        )
        for plan in plans:
            print(dict(plan.mesh), plan.fits, plan.time and plan.time.step)
        ```
    """
    found = Target.named(target) if isinstance(target, str) else target
    compiler = find_backend(found, backend)
    shapes = [*(mesh_shapes(devices, axes, found.per_host) if meshes is None else meshes)]
    if not shapes:
        raise UsageError(
            f"there is no mesh of {devices} devices to plan; give other axes=, or meshes=."
        )
    places = [find_place(shape, found, devices, compiler) for shape in shapes]
    options = {
        "rule": rule,
        "trainable": trainable,
        "precision": precision,
        "accumulate": accumulate,
        "nonfinite": nonfinite,
        "grad_norms": grad_norms,
        "compiler_options": compiler_options,
    }

    def compile(request: Request) -> Plan | Exception:
        try:
            return run(request)
        except CompilerError as error:
            return error

    answers = list[Any]()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for place in places:
                try:
                    # In this thread, because JAX has settings per thread.
                    request = lower_ours(
                        place, make_model, loss_fn, optim, batch, **options
                    )
                except UsageError as error:
                    answers.append(error)
                else:
                    answers.append(pool.submit(compile, request))
        except BaseException:
            # Do not wait for meshes that are not begun yet.
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    answers = [each.result() if isinstance(each, Future) else each for each in answers]
    plans = [each for each in answers if isinstance(each, Plan)]
    if not plans:
        assert isinstance(answers[0], Exception)
        raise answers[0]
    for shape, answer in zip(shapes, answers, strict=True):
        if isinstance(answer, Exception):
            mesh, reason = format_mesh(used_axes(shape)), " ".join(str(answer).split())
            _LOG.warning("the mesh of %s is left out: %s", mesh, reason)
    return rank(plans)


def rank(plans: Iterable[Plan]) -> list[Plan]:
    """Plans that fit, the fastest first; then the others, by the memory that they need."""

    def order(plan: Plan) -> tuple[bool, int | float]:
        if plan.fits is False:
            return True, plan.memory.peak
        if plan.time is None:
            return False, math.inf
        return False, (plan.time.about or plan.time).step

    return sorted(plans, key=order)


def mesh_shapes(
    devices: int, axes: Sequence[str], per_host: int
) -> Iterator[dict[str, int]]:
    """The mesh shapes to try: few, and none that can only be slower than others.

    Within a host, they are all shapes that divide. Beyond one, a copy of the model is on
    whole hosts, or only on the devices that `tensor` and `context` split it over.

    **Arguments:**

    - `devices`: the number of devices.
    - `axes`: the axes that may be larger than 1.
    - `per_host`: the number of devices of a host.

    **Raises:**

    `ValueError` if an axis is not one that can be searched.
    """
    for axis in axes:
        if axis not in _SEARCHED:
            raise UsageError(
                f"axes={axis!r} cannot be searched; {did_you_mean(axis, _SEARCHED)}use "
                f"some of {comma_list(_SEARCHED)}, or give meshes=."
            )
    host = min(per_host, _MOST_WITHIN)
    names = ("context", "tensor", "fsdp")
    sizes = [_divisors(devices) if axis in axes else [1] for axis in names]
    for context, tensor, fsdp in product(*sizes):
        group = context * tensor * fsdp
        data = devices // group
        fits = data * group == devices and context * tensor <= host
        on_whole_hosts = fsdp == 1 or group % host == 0 or devices <= host or devices % host
        if fits and on_whole_hosts and (data == 1 or "data" in axes):
            yield {"data": data, "fsdp": fsdp, "context": context, "tensor": tensor}


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
