"""Meshes from text, on the accelerators of this machine or on simulated CPU devices."""

import math
import os
import sys
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from ..data._datasets import is_planning
from ..distributed import count_cores
from ..sharding._mesh import AXES, BATCH_AXES, make_mesh
from ..sharding._text import comma_list, did_you_mean

#: CPU devices that JAX can make in a few seconds.
_SIMULATED = 4096


def mesh_from_text(
    text: str, *, devices: int | None = None, batch_size: int | None = None
) -> Mesh:
    """Make a mesh from text such as `data=4,fsdp=2`.

    Call it before JAX has looked for devices: without accelerators it simulates the
    CPU devices that the text asks for, or one per core.

    **Arguments:**

    - `text`: sizes of axes, as for [`eqxshard.make_mesh`][], separated by commas; `-1`
        takes the remaining devices. If neither `data` nor a `-1` is given, `data` is -1.
    - `devices`: how many devices to use, all by default.
    - `batch_size`: simulate only a number of devices that splits this evenly.

    **Returns:**

    The mesh.

    **Raises:**

    `ValueError` if the text is not of this form, there are no devices or not enough, the
    sizes do not fit them, or the axes of the batch have more devices than it has examples.

    !!! Example

        ```python
        mesh = eqxshard.run.mesh_from_text("data=2,fsdp=-1", devices=8)
        ```
    """
    sizes = complete_mesh(parse_mesh(text))
    simulate_devices(_count_to_simulate(sizes, devices, batch_size))
    found = find_devices(devices)
    return make_mesh(**sizes, devices=found)


def parse_mesh(text: str) -> dict[str, Any]:
    """The sizes of mesh axes in a text such as `data=4,fsdp=2`.

    **Arguments:**

    - `text`: axes and sizes.

    **Returns:**

    The sizes by axis, as for [`eqxshard.make_mesh`][].

    **Raises:**

    `ValueError` naming the part that is not of this form.
    """
    sizes = {}
    for part in text.split(","):
        axis, _, size = (piece.strip() for piece in part.partition("="))
        if axis not in AXES:
            raise ValueError(
                f"the mesh {text!r} names the axis {axis!r}; {did_you_mean(axis, AXES)}the "
                f"axes are {comma_list(AXES)}."
            )
        if axis in sizes:
            raise ValueError(f"the mesh {text!r} has {axis} twice; give it one size.")
        try:
            sizes[axis] = int(size)
        except ValueError:
            raise ValueError(
                f"the mesh {text!r} has no size in {part.strip()!r}; write {axis}=2."
            ) from None
    return sizes


def complete_mesh(sizes: Mapping[str, int]) -> dict[str, Any]:
    """Let the axis data take the remaining devices, if no other axis does."""
    return {"data": 1 if -1 in sizes.values() else -1} | dict(sizes)


def simulate_devices(count: int) -> None:
    """Simulate CPU devices, for machines without accelerators.

    Call it before JAX has looked for devices. It does nothing if `$JAX_NUM_CPU_DEVICES`
    gives a number, or several processes were started, each with devices of its own; and it
    makes no difference to accelerators. If JAX has looked already, it does nothing either,
    and warns on stderr if that leaves a single CPU device where more were asked for.

    **Arguments:**

    - `count`: how many.
    """
    if "JAX_NUM_CPU_DEVICES" not in os.environ and not jax.distributed.is_initialized():
        try:
            jax.config.update("jax_num_cpu_devices", count)
        except RuntimeError:  # JAX has looked for devices already.
            if jax.default_backend() == "cpu" and jax.device_count() == 1 < count:
                print(
                    f"warning: JAX was used before {count} CPU devices could be simulated, "
                    "so there is only one; call eqxshard.train before other JAX functions, "
                    f"or set JAX_NUM_CPU_DEVICES={count}.",
                    file=sys.stderr,
                )


def find_devices(count: int | None = None) -> list[Any]:
    """The devices of this run.

    **Arguments:**

    - `count`: how many, all by default.

    **Returns:**

    The first `count` of `jax.devices()`.

    **Raises:**

    `ValueError` if JAX finds none, or fewer; or if these are not all devices of several
    processes.
    """
    if is_planning():
        raise ValueError(
            "the script asks for devices before it trains, and those of a plan are not "
            "there; give eqxshard.train the mesh as text, such as mesh='fsdp=-1'."
        )
    try:
        found = jax.devices()
    # If there is no plugin for CUDA, JAX fails on an assertion without a message.
    except (AssertionError, RuntimeError) as error:
        platforms = os.environ.get("JAX_PLATFORMS", "")
        reason = " ".join(str(error).split()) or "the plugin for it is not installed"
        raise ValueError(
            f"JAX finds no devices for JAX_PLATFORMS={platforms}: {reason}; unset it, or "
            "install JAX for the accelerator, such as jax[cuda12]."
        ) from error
    if count is None or count == len(found):
        return found
    if count > len(found):
        raise ValueError(
            f"{count} devices are more than the {len(found)} x {found[0].platform} that "
            f"there are; use {len(found)} or fewer."
        )
    if jax.process_count() > 1:
        raise ValueError(
            f"{count} devices are not all {len(found)} of {jax.process_count()} processes; "
            "use all of them, or start fewer processes."
        )
    return found[:count]


def _count_to_simulate(
    sizes: Mapping[str, int], devices: int | None, batch_size: int | None
) -> int:
    """The CPU devices to simulate for a mesh: up to one per core, if an axis is -1."""
    if devices is not None and devices < 1:
        raise ValueError(f"{devices} devices are too few; use 1 or more.")
    fixed = math.prod(size for size in sizes.values() if size > 0)
    counts = range(fixed, count_cores() + 1, fixed) if -1 in sizes.values() else ()

    def parts(count: int) -> int:
        """How many parts of a batch that many devices take."""
        rows = (sizes.get(axis, 1) for axis in BATCH_AXES)
        return math.prod(max(1, count // fixed if size == -1 else size) for size in rows)

    fits = (n for n in counts if batch_size is None or batch_size % parts(n) == 0)
    count = max(fits, default=fixed) if devices is None else devices
    if batch_size is not None and parts(count) > batch_size:
        raise ValueError(
            f"{parts(count)} devices along {' and '.join(BATCH_AXES)} are more than the "
            f"{batch_size} examples of a batch; use fewer, or a larger batch size."
        )
    return min(count, _SIMULATED)
