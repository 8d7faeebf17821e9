"""A text file with the sharding of each array, for people to review."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ..compiled._communication import KINDS
from ..sharding._files import read_bytes
from ..sharding._leaves import array_leaves, format_array
from ..sharding._mesh import describe_mesh
from ..sharding._placement import shardings
from ..sharding._rule import Rule
from ..sharding._spec import axes_of
from ._collectives import collectives, plural

UPDATE = "EQXSHARD_UPDATE_LOCKS"
_HEAD = f"""\
# The sharding of each array, and the collectives of the compiled step. Written by
# eqxshard.testing with jax {{version}}; write it again with {UPDATE}=1.
"""
_VERSION = re.compile(r"with jax (\S+);")
_LEAF = re.compile(r"(.*): (\S+\[[\d,]*\]) (P\(.*\))")
_COUNT = re.compile(r"([a-z-]+): (\d+), (\d+) bytes")


class _Lock(NamedTuple):
    """The contents of a file.

    - `mesh`: in one line.
    - `arrays`: by path: dtype and shape, such as `float32[8,4]`, and spec.
    - `collectives`: by kind: their number and their bytes; `None` without a step.
    """

    mesh: str
    arrays: dict[str, tuple[str, str]]
    collectives: dict[str, tuple[int, int]] | None


def assert_sharding_lock(
    path: str | os.PathLike[str],
    tree: PyTree,
    mesh: Mesh,
    rule: Rule,
    *,
    step: Any = None,
    batch: PyTree = None,
    update: bool | None = None,
) -> None:
    """Check that shardings, and the collectives of a step, are those in a text file.

    Commit the file: whoever reviews a change of the rule, the model or the step then sees
    how it affects each array. A missing file is written, except in CI (where the
    environment has `CI=true`).

    **Arguments:**

    - `path`: of the file.
    - `tree`: a model, a train state or any other PyTree, of arrays or of
        `jax.ShapeDtypeStruct`s. Arrays on a mesh have a sharding already; the rule decides
        the others.
    - `mesh`, `rule`: as for [`eqxshard.shardings`][].
    - `step`, `batch`: to lock the collectives of `step(tree, batch)`, too, as
        [`eqxshard.testing.collectives`][] counts them. They depend on the platform, and
        may change with JAX's version.
    - `update`: write the file, whatever its contents. By default, only if the environment
        has `EQXSHARD_UPDATE_LOCKS=1`.

    **Raises:**

    `AssertionError` with each difference, such as `embed: P(fsdp) -> P()` or
    `+2 all-gathers`, or if the file is missing in CI; `ValueError` if it is not a lock
    file.

    !!! Example

        ```python
        def test_sharding_of_the_model():
            eqxshard.testing.assert_sharding_lock(
                "tests/model.lock", state, mesh, rule, step=train_step, batch=batch
            )
        ```
    """
    new = _make_lock(tree, mesh, rule, step, batch)
    check_file(
        path,
        _format(new),
        lambda text: _compare(_parse(text, path), new),
        update=update,
        compiled=new.collectives is not None,
    )


def check_file(
    path: str | os.PathLike[str],
    new: str,
    compare: Callable[[str], list[str]],
    *,
    update: bool | None,
    compiled: bool,
) -> None:
    """Compare a lock file with what it should be, or write it.

    **Arguments:**

    - `path`: of the file.
    - `new`: what to write.
    - `compare`: lists the differences between the text of the file and what is new.
    - `update`: whether to write it, if that is not left to the environment.
    - `compiled`: whether it says what XLA made, which depends on the version of JAX.

    **Raises:**

    `AssertionError` with the differences, or if the file is missing in CI.
    """
    file = Path(path)
    if update is None:
        update = os.environ.get(UPDATE, "0") not in ("", "0")
    if not update and not file.exists():
        if os.environ.get("CI", "false").lower() not in ("", "0", "false"):
            raise AssertionError(
                f"{path} is missing, and CI does not write it; run this test once on your "
                "machine, and commit the file."
            )
        update = True
    if update:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(new, encoding="utf-8")
        return
    text = read_bytes(file).decode()
    lines = compare(text)
    if not lines:
        return
    written = _VERSION.search(text)
    version = written[1] if written else "another version"
    other = (
        f"The file was written with jax {version}, and this is {jax.__version__}, whose "
        "XLA may use other collectives. "
        if compiled and version != jax.__version__
        else ""
    )
    raise AssertionError(
        f"{path} differs:\n  "
        + "\n  ".join(lines)
        + f"\n{other}If the change is intended, run this test once with {UPDATE}=1, and "
        "commit the file."
    )


def _make_lock(tree: PyTree, mesh: Mesh, rule: Rule, step: Any, batch: PyTree) -> _Lock:
    leaves = array_leaves(tree)
    chosen = [_current_sharding(path, leaf, mesh) for path, leaf in leaves]
    if None in chosen:
        by_rule = jax.tree.leaves(shardings(tree, mesh, rule))
        chosen = [current or ruled for current, ruled in zip(chosen, by_rule, strict=True)]
    arrays = {
        path: (format_array(leaf), _format_spec(sharding.spec))
        for (path, leaf), sharding in zip(leaves, chosen, strict=True)
    }
    if step is None:
        return _Lock(describe_mesh(mesh), arrays, None)
    found = collectives(step, tree, batch)
    by_kind = {kind: (count, found.bytes[kind]) for kind, count in found.counts.items()}
    return _Lock(describe_mesh(mesh), arrays, by_kind)


def _current_sharding(path: str, leaf: Any, mesh: Mesh) -> NamedSharding | None:
    """The sharding of an array that is on a mesh already, which must be this mesh."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return None
    if isinstance(sharding.mesh, Mesh) and sharding.mesh != mesh:
        raise ValueError(
            f"{path or 'the array'} is on {describe_mesh(sharding.mesh)}, not on "
            f"{describe_mesh(mesh)}; give the mesh that it was placed on."
        )
    return sharding


def _format_spec(spec: PartitionSpec) -> str:
    """The shortest form of a spec in a lock file: `P((data, fsdp), None, tensor)`."""
    entries = []
    for entry in spec:
        names = ", ".join(axes_of(entry))
        entries.append(f"({names})" if len(axes_of(entry)) > 1 else names or "None")
    while entries and entries[-1] == "None":
        entries.pop()
    return f"P({', '.join(entries)})"


def _format(lock: _Lock) -> str:
    lines = ["[mesh]", lock.mesh, "[arrays]"]
    lines += [f"{path}: {array} {spec}" for path, (array, spec) in lock.arrays.items()]
    if lock.collectives is not None:
        lines += ["[collectives]"]
        lines += [
            f"{kind}: {count}, {size} bytes"
            for kind, (count, size) in lock.collectives.items()
        ]
    return _HEAD.format(version=jax.__version__) + "\n".join(lines) + "\n"


def _parse(text: str, path: str | os.PathLike[str]) -> _Lock:
    section, mesh, arrays, by_kind = "", "", {}, None
    for number, line in enumerate(text.splitlines(), 1):
        leaf, count = _LEAF.fullmatch(line), _COUNT.fullmatch(line)
        if line.startswith("#") or not line:
            continue
        elif line in ("[mesh]", "[arrays]", "[collectives]"):
            section = line
            by_kind = {} if line == "[collectives]" else by_kind
        elif section == "[mesh]":
            mesh = line
        elif section == "[arrays]" and leaf:
            arrays[leaf[1]] = (leaf[2], leaf[3])
        elif section == "[collectives]" and count and by_kind is not None:
            by_kind[count[1]] = (int(count[2]), int(count[3]))
        else:
            raise ValueError(
                f"{path}, line {number} is not valid in a lock file: {line!r}; write the "
                f"file again with {UPDATE}=1."
            )
    return _Lock(mesh, arrays, by_kind)


def _compare(old: _Lock, new: _Lock) -> list[str]:
    """The differences between two locks, one line each."""
    lines = [] if old.mesh == new.mesh else [f"mesh: {old.mesh} -> {new.mesh}"]
    for path, (array, spec) in new.arrays.items():
        if path not in old.arrays:
            lines.append(f"+ {path}: {array} {spec}")
            continue
        old_array, old_spec = old.arrays[path]
        if array != old_array:
            lines.append(f"{path}: {old_array} {old_spec} -> {array} {spec}")
        elif spec != old_spec:
            lines.append(f"{path}: {old_spec} -> {spec}")
    for path, (array, spec) in old.arrays.items():
        if path not in new.arrays:
            lines.append(f"- {path}: {array} {spec}")
    if old.collectives is not None and new.collectives is not None:
        lines += _compare_collectives(old.collectives, new.collectives)
    elif old.collectives is not None:
        lines.append("collectives: no step was given")
    elif new.collectives is not None:
        lines.append("collectives: the file has none")
    return lines


def _compare_collectives(
    old: dict[str, tuple[int, int]], new: dict[str, tuple[int, int]]
) -> list[str]:
    lines = []
    for kind in KINDS:
        old_count, old_bytes = old.get(kind, (0, 0))
        count, nbytes = new.get(kind, (0, 0))
        size = f"{old_bytes:,} -> {nbytes:,} bytes"
        if count != old_count:
            sign = "+" if count > old_count else "-"
            lines.append(f"{sign}{plural(abs(count - old_count), kind)} ({size})")
        elif nbytes != old_bytes:
            lines.append(f"{plural(count, kind)}: {size}")
    return lines
