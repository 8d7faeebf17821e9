"""Crash dumps: the inputs of a step that was not finite.

A dump has arrays, numbers and names. The code comes from whoever replays it: nothing that
a dump says is imported or called.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..checkpoint._arrays import (
    abstract_array,
    array_metadata,
    check_structure,
    partition_by_path,
    read,
    write,
)
from ..checkpoint._checksums import is_complete, verify, write_checksums
from ..distributed import barrier, is_main_process
from ..sharding._files import read_json
from ..sharding._leaves import array_leaves, is_array, is_key
from ..training._state import TrainState, split_model, without_state
from ..transforms._partition import Static, partition
from ._script import name_in_script

_FILE = "crash_dump.json"
#: What comes of JSON that says something else than is expected.
_ERRORS = (LookupError, TypeError, ValueError, AttributeError, OverflowError)


@dataclass(frozen=True)
class CrashDump:
    """A step that was not finite.

    - `steps`: the numbers of all such steps in a row; the dump is of the first.
    - `rows`: the indices in the source of the batch's examples, if known.
    - `loss_name`: what the run's script called the loss function, if it had a name.
    - `compute`: the type that the loss is computed in, if not that of the arrays.
    - `trainable`: which arrays of the model are trained: a PyTree of booleans.
    - `model`, `model_state`, `batch`, `key`, `extra`: the inputs of the loss.
    """

    steps: list[int]
    rows: list[int] | None
    loss_name: str | None
    compute: Any
    trainable: PyTree
    model: PyTree
    model_state: eqx.nn.State | None
    batch: PyTree
    key: Any
    extra: Sequence[PyTree] = ()


def write_crash_dump(
    folder: Any,
    state: TrainState,
    steps: Sequence[int],
    batch: PyTree,
    train_step: Any,
    loader: Any,
    extra: Sequence[PyTree] = (),
) -> None:
    """Write down the first of several steps that were not finite.

    **Arguments:**

    - `folder`: an `etils.epath.Path`, whose contents are replaced.
    - `state`: the state of the run, whose parameters such steps have not changed.
    - `steps`: the numbers of the steps, counted from 1.
    - `batch`: the batch of the first of them.
    - `train_step`: an [`eqxshard.TrainStep`][], for its settings.
    - `loader`: what made the batch.
    - `extra`: what else the loss function was given.

    **Raises:**

    `TypeError` naming the part of the batch, or of `extra`, that cannot be written.
    """
    config = train_step.config.following(state)
    trained, _ = split_model(state.model, config.trainable)
    _, static = partition(state.model)
    inputs = {"batch": batch, "extra": [*extra]}
    key = jax.random.fold_in(state.key, steps[0] - 1)
    made = {"model": state.model, "model_state": state.model_state}
    leaves, _ = partition_by_path({**made, **inputs, "key": key})
    rows = getattr(loader, "rows", None)
    compute = config.precision and config.precision.compute
    dump = {
        "steps": list(steps),
        "rows": None if rows is None else np.asarray(rows(steps[0] - 1)).tolist(),
        "loss_fn": name_in_script(config.loss_fn),
        "compute": compute and jnp.dtype(compute).name,
        "trained": [path for path, _ in array_leaves(trained, "model")],
        "leaves": {path: array_metadata(leaf) for path, leaf in leaves.items()},
        "batch": _describe(batch, "batch", static),
        "extra": [_describe(x, f"extra.{i}", static) for i, x in enumerate(extra)],
    }
    if is_main_process():
        if folder.exists():
            folder.rmtree()
        folder.parent.mkdir(parents=True, exist_ok=True)
    barrier("crash dump")
    write(folder, leaves).result()
    if is_main_process():
        (folder / _FILE).write_text(json.dumps(dump, indent=1) + "\n")
        write_checksums(folder)


def read_crash_dump(folder: Any, make_model: Callable[[Any], PyTree]) -> CrashDump:
    """Read what `write_crash_dump` wrote, onto one device.

    **Arguments:**

    - `folder`: an `etils.epath.Path`.
    - `make_model`: makes a model like the one that was trained, from a key.

    **Raises:**

    `FileNotFoundError` if it is not there; `ValueError` if it is damaged, or of another
    model.
    """
    if not is_complete(folder) or not (folder / _FILE).exists():
        raise FileNotFoundError(
            f"{folder} is not a crash dump; give the folder that the run named."
        )
    damage = verify(folder)
    if damage is not None:
        raise ValueError(
            f"the crash dump {folder} is damaged: {damage}; run the step again."
        )
    dump = read_json(folder / _FILE)
    try:
        leaves = {path: abstract_array(leaf) for path, leaf in dump["leaves"].items()}
        found = {
            "steps": [int(dump["steps"][0]), *map(int, dump["steps"][1:])],
            "rows": dump["rows"] and [*map(int, dump["rows"])],
            "loss_name": dump["loss_fn"] and str(dump["loss_fn"]),
            "compute": dump["compute"] and _float(dump["compute"]),
        }
        trained = {*dump["trained"]}
        inputs = dump["batch"], {"list": [*dump["extra"]]}
    except _ERRORS as error:
        raise _not_ours(folder, error) from None
    like, like_state = without_state(eqx.filter_eval_shape(make_model, jax.random.key(0)))
    _, model_static = partition(like)
    wanted, static = partition_by_path({"model": like, "model_state": like_state})
    saved = {path: dump["leaves"][path] for path in leaves if path.startswith("model")}
    check_structure(wanted, saved, f"the crash dump {folder}")
    arrays = {path: _loose(leaf) for path, leaf in read(folder, leaves).items()}
    try:
        batch, extra = [_rebuild(part, arrays, model_static) for part in inputs]
        key = arrays["key"]
    except _ERRORS as error:
        raise _not_ours(folder, error) from None
    made = static.combine([arrays[path] for path in wanted])
    leaf_is_trained = [path in trained for path in wanted if path.startswith("model.")]
    return CrashDump(
        **found,
        **made,
        trainable=_among_leaves(model_static, leaf_is_trained),
        batch=batch,
        key=key,
        extra=extra,
    )


def _float(name: str) -> Any:
    dtype = jnp.dtype(name)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"nothing is computed in {name!r}")
    return dtype


def _not_ours(folder: Any, error: Exception) -> ValueError:
    return ValueError(
        f"the crash dump {folder} cannot be read ({type(error).__name__}: {error}): it is "
        "damaged, or of another version; run the step again with this version."
    )


def _loose(leaf: Any) -> Any:
    """An array that goes to any devices, as those of the script's own meshes."""
    if is_key(leaf):
        data = jnp.asarray(np.asarray(jax.random.key_data(leaf)))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    return jnp.asarray(np.asarray(leaf))


def _among_leaves(static: Static, chosen: Sequence[bool]) -> PyTree[bool]:
    """A boolean for each leaf of a model, from those of its arrays."""
    spec = static.only(chosen)
    return jax.tree.map(bool, spec, is_leaf=lambda leaf: leaf is None)


def _describe(node: Any, where: str, model: Static) -> dict[str, Any]:
    """Plain containers of arrays as JSON, and models like the one that is trained."""
    if is_array(node):
        return {"array": where}
    if node is None or isinstance(node, bool | int | float | str):
        return {"value": node}
    if type(node) in (list, tuple):
        parts = [_describe(part, f"{where}.{i}", model) for i, part in enumerate(node)]
        return {type(node).__name__: parts}
    if isinstance(node, dict) and all(isinstance(key, str) for key in node):
        return {
            "dict": {key: _describe(x, f"{where}.{key}", model) for key, x in node.items()}
        }
    if partition(node)[1] == model:
        return {"model": [path for path, _ in array_leaves(node, where)]}
    raise TypeError(
        f"{where} is a {type(node).__name__}, which a crash dump cannot hold; use dicts, "
        "lists and tuples of arrays, or a model like the one that is trained."
    )


def _rebuild(node: Any, arrays: Mapping[str, Any], model: Static) -> PyTree:
    """The reverse of `_describe`."""
    ((kind, content),) = node.items()
    if kind == "array":
        return arrays[content]
    if kind == "value":
        return content
    if kind == "model" and len(content) == model.array_count:
        return model.combine([arrays[path] for path in content])
    if kind == "dict":
        return {key: _rebuild(part, arrays, model) for key, part in content.items()}
    if kind not in ("list", "tuple"):
        raise LookupError(f"{kind!r} is unknown")
    parts = [_rebuild(part, arrays, model) for part in content]
    return parts if kind == "list" else tuple(parts)
