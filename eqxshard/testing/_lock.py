"""A file that says where each array lies, for people to review."""

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ..mesh import describe
from ..rules import Rule
from ..sharding import is_array, leaf_path, shardings
from ._collectives import KINDS, collectives, plural

_UPDATE = "EQXSHARD_UPDATE_LOCKS"
_HEAD = f"""\
# Where each array lies, and what the compiled step sends between devices. Written by
# eqxshard.testing with jax {{version}}; write it again with {_UPDATE}=1.
"""
_VERSION = re.compile(r"with jax (\S+);")
_LEAF = re.compile(r"(.*): (\S+\[[\d,]*\]) (P\(.*\))")
_COUNT = re.compile(r"([a-z-]+): (\d+), (\d+) bytes")


class _Lock(NamedTuple):
    """What a file says.

    - `mesh`: in words.
    - `arrays`: by path: type and shape, such as `float32[8,4]`, and spec.
    - `sent`: by kind of collective: how many, and their bytes; `None` without a step.
    """

    mesh: str
    arrays: dict[str, tuple[str, str]]
    sent: dict[str, tuple[int, int]] | None


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
    """Check that a text file still says where each array lies, and what a step sends.

    Commit the file: whoever reviews a change of the rule, the model or the step reads in
    it what becomes of the arrays. A file that is not there is written, but not in CI
    (where the environment has `CI=true`).

    **Arguments:**

    - `path`: of the file.
    - `tree`: a model, a train state or any other PyTree, of arrays or of
        `jax.ShapeDtypeStruct`s. What is on a mesh lies as it lies; for the rest the rule
        is asked.
    - `mesh`, `rule`: as for [`eqxshard.shardings`][].
    - `step`, `batch`: to lock the collectives of `step(tree, batch)`, too, as
        [`eqxshard.testing.collectives`][] counts them. They depend on the platform, and
        may change with JAX's version.
    - `update`: write the file, whatever it says now. By default that is so where the
        environment has `EQXSHARD_UPDATE_LOCKS=1`.

    **Raises:**

    `AssertionError` with each difference, such as `embed: P(fsdp) -> P()` or
    `+2 all-gathers`, or if there is no file in CI; `ValueError` if the file is no lock.

    !!! Example

        ```python
        def test_where_the_model_lies():
            eqxshard.testing.assert_sharding_lock(
                "tests/model.lock", state, mesh, rule, step=train_step, batch=batch
            )
        ```
    """
    file = Path(path)
    new = _look(tree, mesh, rule, step, batch)
    if update is None:
        update = os.environ.get(_UPDATE, "0") not in ("", "0")
    if not update and not file.exists():
        if os.environ.get("CI", "false").lower() not in ("", "0", "false"):
            raise AssertionError(
                f"{path} is not there, and CI does not write it; run this test once on "
                "your machine, and commit the file."
            )
        update = True
    if update:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_text(new), encoding="utf-8")
        return
    text = file.read_text(encoding="utf-8")
    lines = _changes(_parse(text, path), new)
    if not lines:
        return
    written = _VERSION.search(text)
    version = written[1] if written else "another version"
    other = (
        f"The file was written with jax {version}, and this is {jax.__version__}: XLA may "
        "have changed the collectives by itself. "
        if new.sent is not None and version != jax.__version__
        else ""
    )
    raise AssertionError(
        f"{path} says otherwise:\n  "
        + "\n  ".join(lines)
        + f"\n{other}If this is as it should be, run this test once with {_UPDATE}=1, and "
        "commit the file."
    )


def _look(tree: PyTree, mesh: Mesh, rule: Rule, step: Any, batch: PyTree) -> _Lock:
    arrays = {}
    flat = jax.tree_util.tree_leaves_with_path(tree)
    leaves = [(leaf_path(path), leaf) for path, leaf in flat if is_array(leaf)]
    places = [_own(path, leaf, mesh) for path, leaf in leaves]
    if None in places:
        asked = jax.tree.leaves(shardings(tree, mesh, rule))
        places = [own or place for own, place in zip(places, asked, strict=True)]
    for (path, leaf), place in zip(leaves, places, strict=True):
        shape = ",".join(map(str, leaf.shape))
        arrays[path] = (f"{leaf.dtype}[{shape}]", _spec(place.spec))
    if step is None:
        return _Lock(describe(mesh), arrays, None)
    found = collectives(step, tree, batch)
    sent = {kind: (count, found.bytes[kind]) for kind, count in found.counts.items()}
    return _Lock(describe(mesh), arrays, sent)


def _own(path: str, leaf: Any, mesh: Mesh) -> NamedSharding | None:
    """Where an array lies already, if it is on a mesh: it must be this one."""
    place = getattr(leaf, "sharding", None)
    if not isinstance(place, NamedSharding):
        return None
    if isinstance(place.mesh, Mesh) and place.mesh != mesh:
        raise ValueError(
            f"{path or 'the array'} lies on {describe(place.mesh)} and not on "
            f"{describe(mesh)}; give the mesh that it was placed on."
        )
    return place


def _spec(spec: PartitionSpec) -> str:
    """Such as `P((data, fsdp), None, tensor)`, in one way of several that mean the same."""
    entries = []
    for entry in spec:
        axes = entry if isinstance(entry, tuple) else (entry,)
        names = ", ".join(map(str, axes))
        entries.append(f"({names})" if len(axes) > 1 else names or "None")
    while entries and entries[-1] == "None":
        entries.pop()
    return f"P({', '.join(entries)})"


def _text(lock: _Lock) -> str:
    lines = ["[mesh]", lock.mesh, "[arrays]"]
    lines += [f"{path}: {array} {spec}" for path, (array, spec) in lock.arrays.items()]
    if lock.sent is not None:
        lines += ["[collectives]"]
        lines += [f"{kind}: {n}, {size} bytes" for kind, (n, size) in lock.sent.items()]
    return _HEAD.format(version=jax.__version__) + "\n".join(lines) + "\n"


def _parse(text: str, path: str | os.PathLike[str]) -> _Lock:
    section, mesh, arrays, sent = "", "", {}, None
    for number, line in enumerate(text.splitlines(), 1):
        leaf, count = _LEAF.fullmatch(line), _COUNT.fullmatch(line)
        if line.startswith("#") or not line:
            continue
        elif line in ("[mesh]", "[arrays]", "[collectives]"):
            section = line
            sent = {} if line == "[collectives]" else sent
        elif section == "[mesh]":
            mesh = line
        elif section == "[arrays]" and leaf:
            arrays[leaf[1]] = (leaf[2], leaf[3])
        elif section == "[collectives]" and count and sent is not None:
            sent[count[1]] = (int(count[2]), int(count[3]))
        else:
            raise ValueError(
                f"{path}, line {number} is no line of a lock: {line!r}; write the file "
                f"again with {_UPDATE}=1."
            )
    return _Lock(mesh, arrays, sent)


def _changes(old: _Lock, new: _Lock) -> list[str]:
    """What became of what a file says, in words."""
    lines = []
    if old.mesh != new.mesh:
        lines.append(f"mesh: {old.mesh} -> {new.mesh}")
    for path, (array, spec) in new.arrays.items():
        if path not in old.arrays:
            lines.append(f"+ {path}: {array} {spec}")
            continue
        was_array, was_spec = old.arrays[path]
        if array != was_array:
            lines.append(f"{path}: {was_array} {was_spec} -> {array} {spec}")
        elif spec != was_spec:
            lines.append(f"{path}: {was_spec} -> {spec}")
    for path, (array, spec) in old.arrays.items():
        if path not in new.arrays:
            lines.append(f"- {path}: {array} {spec}")
    if (old.sent is None) != (new.sent is None):
        with_step = "the file has none" if old.sent is None else "no step was given"
        lines.append(f"collectives: {with_step}")
    elif old.sent is not None and new.sent is not None:
        for kind in KINDS:
            (was, was_bytes), (now, now_bytes) = (
                lock.get(kind, (0, 0)) for lock in (old.sent, new.sent)
            )
            size = f"{was_bytes:,} -> {now_bytes:,} bytes"
            if was != now:
                sign = "+" if now > was else "-"
                lines.append(f"{sign}{plural(abs(now - was), kind)} ({size})")
            elif was_bytes != now_bytes:
                lines.append(f"{plural(now, kind)}: {size}")
    return lines
