"""Lock files: text files of shardings, and of communication, for people to review."""

import difflib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ..compiled._communication import Collective, join_axes
from ..planning._plan import Plan
from ..sharding._files import read_bytes
from ..sharding._leaves import array_leaves, format_array
from ..sharding._mesh import describe_mesh
from ..sharding._placement import shardings
from ..sharding._rule import Rule
from ..sharding._spec import axes_of, format_sizes
from ._collectives import collectives

UPDATE = "EQXSHARD_UPDATE_LOCKS"


def assert_sharding_lock(
    path: str | os.PathLike[str],
    tree: PyTree,
    mesh: Mesh,
    rule: Rule,
    *,
    step: Any = None,
    batch: PyTree = None,
) -> None:
    """Check that shardings, and the collectives of a step, are those in a text file.

    Commit the file: whoever reviews a change of the rule, the model or the step then sees
    how it affects each array. A missing file is written, except in CI (where the
    environment has `CI=true`); with `EQXSHARD_UPDATE_LOCKS=1` in the environment, it is
    written again.

    **Arguments:**

    - `path`: the path of the file.
    - `tree`: a model, a train state or any other PyTree, of arrays or of
        `jax.ShapeDtypeStruct`s. If all arrays are on a mesh, their shardings count; else
        the rule decides.
    - `mesh`, `rule`: as for [`eqxshard.shardings`][].
    - `step`, `batch`: to lock the collectives of `step(tree, batch)`, too, as
        [`eqxshard.testing.collectives`][] counts them. They depend on the platform, and
        may change with JAX's version.

    **Raises:**

    `AssertionError` with a diff of the file, or if it is missing in CI.

    !!! Example

        ```python
        def test_sharding_of_the_model():
            eqxshard.testing.assert_sharding_lock(
                "tests/model.lock", state, mesh, rule, step=train_step, batch=batch
            )
        ```
    """
    about = "The sharding of each array, and the collectives of the compiled step."
    lines = ["[mesh]", describe_mesh(mesh), "[arrays]", *_arrays(tree, mesh, rule)]
    if step is not None:
        found = collectives(step, tree, batch)
        lines.append("[collectives]")
        lines += [f"{k}: {n}, {found.bytes[k]} bytes" for k, n in found.counts.items()]
    _check_file(path, about, lines)


def assert_plan_lock(path: str | os.PathLike[str], plan: Plan) -> None:
    """Check that the communication of a planned step is the one in a text file.

    Commit the file: whoever reviews a change of the model, the rule or the version of JAX
    then sees what it does to the communication. The file names arrays and functions but no
    line numbers, so that an edit elsewhere in the code does not change it. It is written as
    for [`eqxshard.testing.assert_sharding_lock`][].

    **Arguments:**

    - `path`: the path of the file. Other versions of JAX may send other data, so have the
        version in its name.
    - `plan`: an [`eqxshard.planning.Plan`][].

    **Raises:**

    `AssertionError` with a diff of the file, or if it is missing in CI.

    !!! Example

        ```python
        def test_communication_of_the_model():
            plan = eqxshard.plan(**arguments, mesh_shape={"fsdp": 8}, backend="gpu")
            file = f"tests/model.jax-{jax.__version__}.lock"
            eqxshard.testing.assert_plan_lock(file, plan)
        ```
    """
    about = "The communication of a planned step: times per step x bytes sent by a device."
    lines = [
        f"backend: {plan.backend}",
        f"devices: {plan.devices} x {plan.target.kind}",
        f"mesh: {format_sizes(dict(plan.mesh))}",
        *_sent(plan),
    ]
    _check_file(path, about, lines)


def _check_file(path: str | os.PathLike[str], about: str, lines: list[str]) -> None:
    """Compare a file's lines, without its head, with new lines; or write the file."""
    file = Path(path)
    update = os.environ.get(UPDATE, "0") not in ("", "0")
    if not update and not file.exists():
        if os.environ.get("CI", "false").lower() not in ("", "0", "false"):
            raise AssertionError(
                f"{path} is missing, and CI does not write it; run this test once on your "
                "machine, and commit the file."
            )
        update = True
    if update:
        head = (
            f"# {about} Written by",
            f"# eqxshard.testing with jax {jax.__version__}; write it again with "
            f"{UPDATE}=1.",
        )
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join((*head, *lines)) + "\n", encoding="utf-8")
        return
    text = read_bytes(file).decode().splitlines()
    old = [line for line in text if not line.startswith("#")]
    if old != lines:
        # Without the diff's file names and line numbers.
        diff = [*difflib.unified_diff(old, lines, n=0, lineterm="")][2:]
        changes = "\n  ".join(line for line in diff if not line.startswith("@@"))
        raise AssertionError(
            f"{path} differs:\n  {changes}\nIf the change is intended, run this test once "
            f"with {UPDATE}=1, and commit the file. This is jax {jax.__version__}."
        )


def _arrays(tree: PyTree, mesh: Mesh, rule: Rule) -> Iterator[str]:
    """A line for each array: `embed: float32[16,8] P(fsdp)`."""
    leaves = array_leaves(tree)
    placed: list[Any] = [getattr(leaf, "sharding", None) for _, leaf in leaves]
    if not all(isinstance(each, NamedSharding) for each in placed):
        placed = jax.tree.leaves(shardings(tree, mesh, rule))
    for (path, leaf), sharding in zip(leaves, placed, strict=True):
        yield f"{path}: {format_array(leaf)} {_format_spec(sharding.spec)}"


def _format_spec(spec: PartitionSpec) -> str:
    """The shortest form of a spec in a lock file: `P((data, fsdp), None, tensor)`."""
    entries = []
    for entry in spec:
        names = ", ".join(axes_of(entry))
        entries.append(f"({names})" if len(axes_of(entry)) > 1 else names or "None")
    while entries and entries[-1] == "None":
        entries.pop()
    return f"P({', '.join(entries)})"


def _sent(plan: Plan) -> Iterator[str]:
    """A line for all collectives of the same kind, axes and cause; a term for each."""
    sent: dict[str, list[str]] = {}
    for each in sorted(plan.collectives, key=lambda each: (each.in_loop, each.sent)):
        times = "?" if each.times is None else each.times
        where = " in a loop" if each.in_loop else ""
        sent.setdefault(_name(each), []).append(f"{times} x {each.sent} bytes{where}")
    for name, terms in sorted(sent.items()):
        yield f"{name}: {' + '.join(terms)}"


def _name(collective: Collective) -> str:
    """A collective's axes, kind and cause, without a line number, which edits change."""
    leaves = f" of {', '.join(collective.leaves)}" if collective.leaves else ""
    file = (collective.line or "").partition(":")[0]
    place = f" in {file} {collective.function or ''}".rstrip() if file else ""
    return f"{join_axes(collective.axes)} {collective.kind}{leaves}{place}"
