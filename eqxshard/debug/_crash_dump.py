"""Crash dumps: the inputs of a step that was not finite."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from ..checkpoint._arrays import (
    abstract_array,
    array_metadata,
    partition_by_path,
    read,
    write,
)
from ..checkpoint._checksums import is_complete, verify, write_checksums
from ..distributed import barrier, is_main_process
from ..training._state import TrainState, flatten_state
from ._references import refer_to_script
from ._structure import Decoder, Encoder

_FILE = "crash_dump.json"


@dataclass(frozen=True)
class CrashDump:
    """A step that was not finite.

    - `steps`: the numbers of all such steps in a row; the dump is of the first.
    - `rows`: the indices in the source of the batch's examples, if known.
    - `model`, `model_state`, `batch`, `key`, `extra`: the inputs of the loss.
    - `loss_fn`, `precision`, `trainable`: as for [`eqxshard.make_train_step`][].
    """

    steps: list[int]
    rows: list[int] | None
    model: PyTree
    model_state: eqx.nn.State | None
    batch: PyTree
    key: Any
    loss_fn: Any
    precision: Any
    trainable: PyTree
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
    - `train_step`: an [`eqxshard.TrainStep`][], for its loss function.
    - `loader`: what made the batch.
    - `extra`: what else the loss function was given.

    **Raises:**

    `TypeError` naming the part of the model, or of the loss function, that cannot be
    written: lambdas and other functions that cannot be imported.
    """
    config = train_step.config.of(state, flatten_state(state)[0])
    model, model_values = _without_state(state.model, state.model_state)
    key = jax.random.fold_in(state.key, steps[0] - 1)
    tree = {"model": model, "state": model_values, "batch": batch, "key": key}
    tree["extra"] = [*extra]
    leaves, _ = partition_by_path(tree)
    encoder = Encoder({id(leaf): path for path, leaf in leaves.items()})
    code = {"loss_fn": config.loss_fn, "precision": config.precision}
    rows = getattr(loader, "rows", None)
    dump = {
        "steps": list(steps),
        "rows": None if rows is None else np.asarray(rows(steps[0] - 1)).tolist(),
        "script": refer_to_script(),
        "leaves": {path: array_metadata(leaf) for path, leaf in leaves.items()},
        "tree": {name: encoder.encode(part, name) for name, part in tree.items()},
        "code": {name: encoder.encode(part, name) for name, part in code.items()},
        "trainable": encoder.encode(config.trainable, "trainable"),
        "has_state": state.model_state is not None,
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


def read_crash_dump(folder: Any) -> CrashDump:
    """Read what `write_crash_dump` wrote, onto one device.

    **Raises:**

    `FileNotFoundError` if it is not there; `ValueError` if it is damaged, or the code
    that it refers to is not.
    """
    if not is_complete(folder) or not (folder / _FILE).exists():
        raise FileNotFoundError(
            f"{folder} is not a crash dump; give the folder that the run named."
        )
    damage = verify(folder)
    if damage is not None:
        raise ValueError(f"the crash dump {folder} is damaged: {damage}.")
    try:
        dump = json.loads((folder / _FILE).read_bytes())
    except ValueError as error:
        raise ValueError(
            f"the crash dump {folder} is damaged: {_FILE} is not JSON ({error})."
        ) from None
    script, run = dump["script"], _run_folder(folder)
    if script is not None and Path(script).resolve().is_relative_to(run):
        raise ValueError(
            f"the crash dump refers to {script}, which came with it; move the script out "
            "of the run's folder to use it."
        )
    wanted = {path: abstract_array(leaf) for path, leaf in dump["leaves"].items()}
    decoder = Decoder(read(folder, wanted), script, run)
    tree = {name: decoder.decode(part) for name, part in dump["tree"].items()}
    model, model_state = tree["model"], None
    if dump["has_state"]:
        model, model_state = _with_state(model, tree["state"])
    return CrashDump(
        steps=dump["steps"],
        rows=dump["rows"],
        model=model,
        model_state=model_state,
        batch=tree["batch"],
        key=tree["key"],
        extra=tree["extra"],
        trainable=decoder.decode(dump["trainable"]),
        **{name: decoder.decode(part) for name, part in dump["code"].items()},
    )


def _run_folder(folder: Any) -> Path:
    """The folder of the run that left a crash dump beside its checkpoints."""
    checkpoints = folder.parent
    run = checkpoints.parent if checkpoints.name == "checkpoints" else checkpoints
    return Path(os.fspath(run)).resolve()


def _is_index(node: Any) -> bool:
    return isinstance(node, eqx.nn.StateIndex)


def _without_state(model: PyTree, state: eqx.nn.State | None) -> tuple[PyTree, list[Any]]:
    """A model whose state indices have no placeholders, and the value of each index."""
    if state is None:
        return model, []
    indices = [x for x in jax.tree.leaves(model, is_leaf=_is_index) if _is_index(x)]
    return _set_inits(model, [None] * len(indices)), [state.get(x) for x in indices]


def _with_state(model: PyTree, values: list[Any]) -> tuple[PyTree, eqx.nn.State]:
    """A model and its state, from the value of each index."""
    return model, eqx.nn.State(_set_inits(model, values))


def _set_inits(model: PyTree, values: list[Any]) -> PyTree:
    rest = iter(values)

    def set_init(node: Any) -> Any:
        if not _is_index(node):
            return node
        return eqx.tree_at(lambda x: x.init, node, next(rest), is_leaf=lambda x: x is None)

    return jax.tree.map(set_init, model, is_leaf=_is_index)
