"""A text file with what a planned step sends, for people to review."""

import os
from collections import Counter
from collections.abc import Mapping

import jax

from ..compiled._collective import Collective, join_axes
from ..planning._plan import Plan
from ..sharding._spec import format_sizes
from ._lock import UPDATE, check_file

_HEAD = f"""\
# What a planned step sends: how often in a step, and the bytes of each device each time.
# Written by eqxshard.testing with jax {{version}}; write it again with {UPDATE}=1.
"""


def assert_plan_lock(
    path: str | os.PathLike[str], plan: Plan, *, update: bool | None = None
) -> None:
    """Check that what a planned step sends is what a text file says.

    Commit the file: whoever reviews a change of the model, the rule or the version of JAX
    then sees what it does to the communication. It names arrays and functions and no
    numbers of lines, so that an edit elsewhere in a file does not change it. A missing file
    is written, except in CI (where the environment has `CI=true`).

    **Arguments:**

    - `path`: of the file. Other versions of JAX and other compilers may send something
        else: let its name say which it is of.
    - `plan`: an [`eqxshard.Plan`][].
    - `update`: write the file, whatever its contents. By default, only if the environment
        has `EQXSHARD_UPDATE_LOCKS=1`.

    **Raises:**

    `AssertionError` with each difference, such as `fsdp all-gather of embedding: 1 x
    14560 bytes -> 2 x 14560 bytes`, or if the file is missing in CI; `ValueError` if it is
    not a lock file.

    !!! Example

        ```python
        def test_communication_of_the_model():
            plan = eqxshard.plan(**arguments, mesh_shape={"fsdp": 8}, backend="gpu")
            file = f"tests/model.jax-{jax.__version__}.lock"
            eqxshard.testing.assert_plan_lock(file, plan)
        ```
    """
    new = _describe(plan)
    check_file(
        path,
        _HEAD.format(version=jax.__version__)
        + "".join(f"{name}: {value}\n" for name, value in new.items()),
        lambda text: _compare(_parse(text, path), new),
        update=update,
        compiled=True,
    )


def _describe(plan: Plan) -> dict[str, str]:
    """The lines of a file, by what is before the last colon."""
    sent: dict[str, Counter[str]] = {}
    for each in plan.collectives:
        times = "?" if each.times is None else each.times
        often = f"{times} x {{}} bytes{' in a loop' if each.in_loop else ''}"
        sent.setdefault(_name(each), Counter())[often] += each.sent
    lines = {
        name: " + ".join(often.format(size) for often, size in sorted(found.items()))
        for name, found in sorted(sent.items())
    }
    return {
        "backend": plan.backend,
        "devices": f"{plan.devices} x {plan.target.kind}",
        "mesh": format_sizes(dict(plan.mesh)),
        **lines,
    }


def _name(collective: Collective) -> str:
    """Without the number of a line, which an edit elsewhere in its file changes."""
    leaves = f" of {', '.join(collective.leaves)}" if collective.leaves else ""
    file = (collective.line or "").partition(":")[0]
    place = f" in {file} {collective.function or ''}".rstrip() if file else ""
    return f"{join_axes(collective.axes)} {collective.kind}{leaves}{place}"


def _parse(text: str, path: str | os.PathLike[str]) -> dict[str, str]:
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("#"):
            continue
        name, colon, value = line.rpartition(": ")
        if not colon:
            raise ValueError(
                f"{path}, line {number} is not valid in a lock file: {line!r}; write the "
                f"file again with {UPDATE}=1."
            )
        found[name] = value
    return found


def _compare(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """The differences between two files, one line each."""
    gone = [f"- {name}: {old[name]}" for name in old if name not in new]
    changed = [
        f"{name}: {old[name]} -> {value}" if name in old else f"+ {name}: {value}"
        for name, value in new.items()
        if old.get(name) != value
    ]
    return changed + gone
