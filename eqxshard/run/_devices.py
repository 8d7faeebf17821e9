"""Meshes from text, on the accelerators of this machine or on simulated CPU devices."""

import math
import os
import sys
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from .._errors import UsageError
from ..distributed import count_cores
from ..sharding._mesh import batch_axes, make_mesh
from ..sharding._spec import AXES
from ..sharding._text import comma_list, did_you_mean

#: The most CPU devices that JAX can make in a few seconds.
_MOST_SIMULATED = 4096

#: XLA's flag for the number of CPU devices, which counts unless JAX's own option is set.
_XLA_COUNT = "--xla_force_host_platform_device_count="


def mesh_from_text(
    text: str, *, devices: int | None = None, batch_size: int | None = None
) -> Mesh:
    """Make a mesh from text such as `data=4,fsdp=2`.

    Call it before JAX has looked for devices: without accelerators it simulates the
    CPU devices that the text asks for, or one per core; or the number that
    `$JAX_NUM_CPU_DEVICES`, JAX's option `jax_num_cpu_devices` or the flag
    `--xla_force_host_platform_device_count` in `$XLA_FLAGS` gives.

    **Arguments:**

    - `text`: sizes of axes, as for [`eqxshard.make_mesh`][], separated by commas; `-1`
        takes the remaining devices. If neither `data` nor a `-1` is given, `data` is -1.
    - `devices`: how many devices to use, all by default.
    - `batch_size`: simulate only a number of devices that splits this evenly.

    **Returns:**

    The mesh.

    **Raises:**

    `ValueError` if the text is not of this form, there are no devices or not enough, or
    the sizes do not fit them.

    !!! Example

        ```python
        mesh = eqxshard.run.mesh_from_text("data=2,fsdp=-1", devices=8)
        ```
    """
    sizes = complete_mesh(parse_mesh(text))
    if devices or _XLA_COUNT not in os.environ.get("XLA_FLAGS", ""):
        simulate_devices(devices or _count_to_simulate(sizes, batch_size))
    return make_mesh(**sizes, devices=find_devices(devices))


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
            raise UsageError(
                f"the mesh {text!r} names the axis {axis!r}; {did_you_mean(axis, AXES)}the "
                f"axes are {comma_list(AXES)}."
            )
        if axis in sizes:
            raise UsageError(f"the mesh {text!r} has {axis} twice; give it one size.")
        try:
            sizes[axis] = int(size)
        except ValueError:
            raise UsageError(
                f"the mesh {text!r} has no size in {part.strip()!r}; write {axis}=2."
            ) from None
    return sizes


def complete_mesh(sizes: Mapping[str, int]) -> dict[str, Any]:
    """Let the axis data take the remaining devices, if no other axis does."""
    return {"data": 1 if -1 in sizes.values() else -1} | dict(sizes)


def simulate_devices(count: int) -> None:
    """Simulate CPU devices, for machines without accelerators.

    Call it before JAX has looked for devices. It does nothing if `$JAX_NUM_CPU_DEVICES` or
    JAX's option `jax_num_cpu_devices` gives a number, or several processes were started,
    each with devices of its own; and it makes no difference to accelerators. If JAX has
    looked already, it does nothing either, and warns on stderr if that leaves a single CPU
    device where more were asked for.

    **Arguments:**

    - `count`: how many.
    """
    chosen: Any = jax.config.jax_num_cpu_devices  # pyright: ignore
    is_chosen = chosen >= 0 or "JAX_NUM_CPU_DEVICES" in os.environ
    if not is_chosen and not jax.distributed.is_initialized():
        try:
            jax.config.update("jax_num_cpu_devices", min(count, _MOST_SIMULATED))
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

    `ValueError` if JAX finds no devices, or fewer; or if there are several processes, and
    `count` leaves out some of their devices.
    """
    try:
        found = jax.devices()
    # If there is no plugin for CUDA, JAX fails on an assertion without a message.
    except (AssertionError, RuntimeError) as error:
        platforms = os.environ.get("JAX_PLATFORMS", "")
        reason = " ".join(str(error).split()) or "the plugin for it is not installed"
        raise UsageError(
            f"JAX finds no devices for JAX_PLATFORMS={platforms}: {reason}; unset it, or "
            "install JAX for the accelerator, such as jax[cuda12]."
        ) from error
    if count is None or count == len(found):
        return found
    if not 1 <= count <= len(found):
        use = "use 1" if len(found) == 1 else f"use 1 to {len(found)}"
        raise UsageError(
            f"{count} devices were asked for, and there are {len(found)} x "
            f"{found[0].platform}; {use}."
        )
    if jax.process_count() > 1:
        raise UsageError(
            f"{count} devices are not all {len(found)} of {jax.process_count()} processes; "
            "use all of them, or start fewer processes."
        )
    return found[:count]


def _count_to_simulate(sizes: Mapping[str, int], batch_size: int | None) -> int:
    """The CPU devices to simulate for a mesh: if an axis is -1, up to one per core."""
    fixed = math.prod(size for size in sizes.values() if size > 0)
    # Negative if one of these axes takes the remaining devices.
    along_batch = math.prod(sizes[axis] for axis in batch_axes(sizes))

    def divides(count: int) -> bool:
        parts = -along_batch * count // fixed if along_batch < 0 else along_batch
        return batch_size is None or batch_size % max(parts, 1) == 0

    counts = range(fixed, count_cores() + 1, fixed) if -1 in sizes.values() else ()
    return max(filter(divides, counts), default=fixed)
