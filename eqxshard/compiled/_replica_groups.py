"""Replica groups: which devices take part in a collective together, and along which axes.

XLA writes them in four forms. The numbers are positions in the mesh.
"""

import functools
import math
import re
from collections.abc import Mapping

import numpy as np

_IOTA = re.compile(r"(?:\[([\d,]+)\]<=)?\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[(.*?)\](?:, ?device_ids=\((.*)\))? ?\{([^}]*)\}")
_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


@functools.cache
def parse_groups(text: str, devices: int) -> np.ndarray | None:
    """The groups of a collective, one in each row; `None` if the text is of no known form.

    **Arguments:**

    - `text`: `{{0,1},{2,3}}`; `[2,2]<=[4]`, the numbers up to four in that shape, or
        `[2,2]<=[2,2]T(1,0)`, transposed first; `mesh['x'=2,'y'=2] {'y'}`, along axes of a
        mesh, whose devices may be in another order, as in `mesh['x'=2,'y'=2],
        device_ids=([2,2]T(1,0)) {'y'}`; `{}`: all devices.
    - `devices`: the number of devices.
    """
    if text.startswith("mesh["):
        return _parse_mesh(text)
    if text.startswith("["):
        return _parse_iota(text)
    rows = re.findall(r"\{([\d, ]*)\}", text.removeprefix("{").removesuffix("}"))
    groups = [_numbers(row) for row in rows if row]
    if not groups and re.fullmatch(r"\{[{} ]*\}", text):
        return np.arange(devices)[None]
    if not groups or len({len(group) for group in groups}) > 1:
        return None
    return np.array(groups)


def axes_of_groups(groups: np.ndarray, sizes: Mapping[str, int]) -> tuple[str, ...] | None:
    """The axes of a mesh along which the devices of a group differ.

    **Arguments:**

    - `groups`: from `parse_groups`.
    - `sizes`: of the axes of the mesh.

    **Returns:**

    The axes, in the order of the mesh; `None` if the groups are not of this mesh.
    """
    if groups.max(initial=0) >= math.prod(sizes.values()):
        return None
    coordinates = np.unravel_index(groups, tuple(sizes.values()))
    return tuple(axis for axis, at in zip(sizes, coordinates) if (at != at[:, :1]).any())


def _parse_iota(text: str) -> np.ndarray | None:
    found = _IOTA.fullmatch(text)
    if found is None:
        return None
    dims = _numbers(found[2])
    ids = np.arange(math.prod(dims)).reshape(dims)
    if found[3]:
        ids = ids.transpose(_numbers(found[3]))
    return ids.reshape(_numbers(found[1])) if found[1] else ids


def _parse_mesh(text: str) -> np.ndarray | None:
    found = _MESH.fullmatch(text)
    if found is None:
        return None
    axes = {name: int(n) for name, n in re.findall(r"'([^']+)'=(\d+)", found[1])}
    ids = np.arange(math.prod(axes.values()))
    if found[2]:
        order = _parse_iota(found[2])
        ids = np.array(_numbers(found[2])) if order is None else order.ravel()
    # A part of an axis, `'x':(before)size`, is an axis of its own.
    dims: list[int] = []
    along: list[int] = []
    parts = {name: (before, size) for name, before, size in _AXIS.findall(found[3])}
    for name, size in axes.items():
        before, part = parts.get(name, ("", ""))
        pieces = [int(before), int(part), size // (int(before) * int(part))] if part else []
        if name in parts:
            along.append(len(dims) + (1 if pieces else 0))
        dims += pieces or [size]
    rest = [dim for dim in range(len(dims)) if dim not in along]
    count = math.prod(dims[dim] for dim in along)
    return ids.reshape(dims).transpose(*rest, *along).reshape(-1, count)


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]
