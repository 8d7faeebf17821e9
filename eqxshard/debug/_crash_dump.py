"""Crash dumps: the inputs of a step that was not finite.

A dump has arrays, numbers and names. The code comes from whoever replays it: nothing that
a dump says is imported or called.
"""

import contextlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .._errors import UsageError, UsageFileError, UsageTypeError
from ..checkpoint._arrays import DamageError, partition_by_path, read, wrap_keys
from ..checkpoint._checksums import is_complete, verify, write_checksums
from ..checkpoint._description import abstract_array, array_metadata, check_structure
from ..checkpoint._save import Save
from ..distributed import broadcast_from_first, is_main_process
from ..sharding._files import read_json
from ..sharding._leaves import array_leaves, is_key
from ..training._state import TrainState, split_model, without_state
from ..training._train_step import TrainStep
from ..transforms._partition import partition
from ._script import name_in_script, script_path

_FILE = "crash_dump.json"


@dataclass(frozen=True)
class CrashDump:
    """A step that was not finite.

    - `steps`: the numbers of all such steps in a row; the dump is of the first.
    - `rows`: the indices in the source of the batch's examples, if known.
    - `loss_name`: what the run's script called the loss function, if it had a name.
    - `compute`, `compute_except`: the type that the loss is computed in, if not that of the
        arrays, and the patterns of those left in theirs.
    - `trainable`: which arrays of the model are trained: a PyTree of booleans.
    - `model`, `model_state`, `batch`, `key`: the inputs of the loss.
    """

    steps: list[int]
    rows: list[int] | None
    loss_name: str | None
    compute: Any
    trainable: PyTree
    model: PyTree
    model_state: eqx.nn.State | None
    batch: dict[str, Any]
    key: Any
    compute_except: tuple[str, ...] = ()


def write_crash_dump(
    folder: Any,
    state: Any,
    steps: Sequence[int],
    batch: Any,
    train_step: Any,
    loader: Any,
    extra: Any = None,
) -> None:
    """Write down the first of several steps that were not finite.

    **Arguments:**

    - `folder`: an `etils.epath.Path`, whose contents are replaced.
    - `state`: the state of the run, whose parameters such steps have not changed.
    - `steps`: the numbers of the steps, counted from 1.
    - `batch`: the batch of the first of them, a dict of arrays.
    - `train_step`: for its settings.
    - `loader`: what made the batch.
    - `extra`: of the run.

    **Raises:**

    `TypeError` if the state, the step, the batch or the `extra` is something else than a
    dump can hold.
    """
    is_dict = isinstance(batch, dict) and all(
        isinstance(entry, jax.Array | np.ndarray) for entry in batch.values()
    )
    ours = isinstance(state, TrainState) and isinstance(train_step, TrainStep)
    if not (is_dict and ours) or extra is not None:
        raise UsageTypeError(
            "a crash dump is of one state and a batch that is a dict of arrays; train by a "
            "step from make_train_step without extra."
        )
    config = train_step.config.following(state)
    trained, _ = split_model(state.model, config.trainable)
    key = jax.random.fold_in(state.key, steps[0] - 1)
    inputs = {
        "model": state.model,
        "model_state": state.model_state,
        "batch": {name: jnp.asarray(entry) for name, entry in batch.items()},
        "key": key,
    }
    leaves, _ = partition_by_path(inputs)
    rows = getattr(loader, "rows", None)
    compute = config.precision and config.precision.compute
    dump = {
        "steps": list(steps),
        "rows": None if rows is None else np.asarray(rows(steps[0] - 1)).tolist(),
        "loss_fn": name_in_script(config.loss_fn),
        "compute": compute and jnp.dtype(compute).name,
        "compute_except": config.precision and config.precision.compute_except,
        "trained": [path for path, _ in array_leaves(trained, "model")],
        "leaves": {path: array_metadata(leaf) for path, leaf in leaves.items()},
    }
    forget_crash_dump(folder)
    Save(folder, leaves).result()
    if is_main_process():
        (folder / _FILE).write_text(json.dumps(dump, indent=1) + "\n")
        write_checksums(folder)


def forget_crash_dump(folder: Any) -> None:
    """Remove a crash dump, if there is one. All processes call it.

    **Raises:**

    `ValueError` in all of them if something else is there, or it cannot be removed.
    """
    fault = None
    if is_main_process():
        try:
            fault = _remove(folder)
        except OSError as error:
            fault = f"{folder} cannot be removed: {error}"
    if (fault := broadcast_from_first(fault)) is not None:
        raise UsageError(fault)


def _remove(folder: Any) -> str | None:
    """Remove a crash dump, or say that it is none."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not os.path.lexists(folder):
        return None
    if os.path.islink(folder) or not (folder / _FILE).exists():
        return f"{folder} is not a crash dump; move it away."
    folder.rmtree()
    return None


#: What makes the model of the run, where that is known.
_make_model: ContextVar[Any] = ContextVar("eqxshard_make_model", default=None)


@contextlib.contextmanager
def replaying(make_model: Any) -> Iterator[None]:
    """Let the commands that replay a run's crash dumps name what makes its model."""
    token = _make_model.set(make_model)
    try:
        yield
    finally:
        _make_model.reset(token)


def replay_command(folder: Any, train_step: Any) -> str:
    """The command that replays a crash dump, with each option that its script needs."""
    command = ["python", "-m", "eqxshard.replay", str(folder), script_path() or "SCRIPT"]
    loss_fn = train_step.config.loss_fn if isinstance(train_step, TrainStep) else None
    # Where it is not known, replay takes the script's function of that name.
    make_model = _make_model.get() or getattr(sys.modules["__main__"], "make_model", None)
    if name_in_script(make_model) != "make_model":
        command += ["--model", name_in_script(make_model) or "NAME"]
    if loss_fn is not None and name_in_script(loss_fn) != "loss_fn":
        command += ["--loss", name_in_script(loss_fn) or "NAME"]
    return shlex.join(command)


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
        raise UsageFileError(
            f"{folder} is not a crash dump; give the folder that the run named."
        )
    damage = verify(folder)
    if damage is not None:
        raise UsageError(
            f"the crash dump {folder} is damaged: {damage}; run the step again."
        )
    dump = read_json(folder / _FILE)
    try:
        leaves = {path: abstract_array(leaf) for path, leaf in dump["leaves"].items()}
        trained = {*dump["trained"]}
        if "key" not in leaves:
            raise LookupError("key")
        found = {
            "steps": [int(dump["steps"][0]), *map(int, dump["steps"][1:])],
            "rows": dump["rows"] and [*map(int, dump["rows"])],
            "loss_name": dump["loss_fn"] and str(dump["loss_fn"]),
            "compute": dump["compute"] and _float(dump["compute"]),
            "compute_except": tuple(map(str, dump.get("compute_except") or ())),
        }
    # What comes of JSON that says something else than is expected.
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UsageError(
            f"the crash dump {folder} cannot be read ({type(error).__name__}: {error}): it "
            "is damaged, or of another version; run the step again with this version."
        ) from None
    like, like_state = without_state(eqx.filter_eval_shape(make_model, jax.random.key(0)))
    wanted, static = partition_by_path({"model": like, "model_state": like_state})
    saved = {path: dump["leaves"][path] for path in leaves if path.startswith("model")}
    check_structure(wanted, saved, f"the crash dump {folder}")
    try:
        arrays = wrap_keys(read(folder, leaves), leaves)
    except DamageError as error:
        raise UsageError(f"{error}; run the step again.") from None
    arrays = {path: _on_any_device(leaf) for path, leaf in arrays.items()}
    _, model_static = partition(like)
    is_trained = [path in trained for path in wanted if path.startswith("model.")]
    trainable = model_static.only(is_trained)
    batch = {path[6:]: x for path, x in arrays.items() if path.startswith("batch.")}
    return CrashDump(
        **found,
        **static.combine([arrays[path] for path in wanted]),
        trainable=jax.tree.map(bool, trainable, is_leaf=lambda leaf: leaf is None),
        batch=batch,
        key=arrays["key"],
    )


def _float(name: str) -> Any:
    dtype = jnp.dtype(name)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise UsageTypeError(f"nothing is computed in {name!r}")
    return dtype


def _on_any_device(leaf: Any) -> Any:
    """An array that goes to any devices, as those of the script's own meshes."""
    if is_key(leaf):
        data = jnp.asarray(np.asarray(jax.random.key_data(leaf)))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    return jnp.asarray(np.asarray(leaf))
