"""The mesh shapes that a search tries by itself."""

import itertools
from collections.abc import Iterator, Sequence

from ..sharding._text import comma_list, did_you_mean

#: The axes that a search may split over, and those of them that stay within a host.
SEARCHED = ("data", "fsdp", "context", "tensor")
_WITHIN = ("context", "tensor")

#: The most devices that `tensor` and `context` span, where hosts are larger.
_MOST_WITHIN = 8

#: How many times as many hosts the next larger group of `fsdp` has.
_STEP = 4


def mesh_shapes(
    devices: int, axes: Sequence[str], per_host: int
) -> Iterator[dict[str, int]]:
    """The mesh shapes to try: few, and none that only loses to others.

    Within a host all that divide. Beyond one, a copy of the model is on one device, on
    some of a host that the layers are split over, or on whole hosts: one, four times as
    many, and so on, or all.

    **Arguments:**

    - `devices`: their number.
    - `axes`: the axes that may be larger than 1.
    - `per_host`: the number of devices of a host.

    **Raises:**

    `ValueError` if an axis is not one that can be searched.
    """
    for axis in axes:
        if axis not in SEARCHED:
            raise ValueError(
                f"axes={axis!r} cannot be searched; {did_you_mean(axis, SEARCHED)}use some "
                f"of {comma_list(SEARCHED)}, or give meshes=."
            )
    host = min(per_host, _MOST_WITHIN)
    within = [_divisors(devices, host) if axis in axes else [1] for axis in _WITHIN]
    for context, tensor in itertools.product(*within):
        inner = context * tensor
        if devices % inner or inner > host:
            continue
        for fsdp in _divisors(devices // inner) if "fsdp" in axes else [1]:
            data = devices // inner // fsdp
            alone = fsdp == 1 or "data" not in axes
            if (data == 1 or "data" in axes) and (
                alone or _is_kept(fsdp * inner, devices, host)
            ):
                yield {"data": data, "fsdp": fsdp, "context": context, "tensor": tensor}


def _is_kept(group: int, devices: int, host: int) -> bool:
    """Whether to try copies of the model over groups of so many devices."""
    if devices <= host or devices % host:
        return True
    if group % host:
        return False
    hosts, kept = devices // host, [1]
    for size in _divisors(hosts):
        if size >= _STEP * kept[-1]:
            kept.append(size)
    return group // host in (*kept, hosts)


def _divisors(number: int, most: int | None = None) -> list[int]:
    return [n for n in range(1, (most or number) + 1) if number % n == 0]
