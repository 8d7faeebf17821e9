"""A model's weights in files that other libraries read and write."""

import logging
import os
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding
from jaxtyping import PyTree

from ..distributed import fetch_whole, is_main_process
from ..sharding._placement import broadcast_prefix
from ..sharding._spec import check_spec
from ..sharding._text import first_few
from ..training._state import TrainState
from ._arrays import partition_by_path, place_parts, target_sharding
from ._weight_files import DTYPES, map_weights
from ._weight_matching import (
    Rename,
    Source,
    Transform,
    WeightsReport,
    list_faults,
    list_left_out,
    match_weights,
    read_part,
)

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


def save_weights(path: str | os.PathLike[str], model: PyTree) -> None:
    """Write a model's arrays to a safetensors file (Hugging Face).

    Each array is named by its path, such as `layers.0.weight`, and written whole, however
    it is sharded. With several processes, all must call this, and process 0 writes.

    **Arguments:**

    - `path`: the file, `*.safetensors`, which is replaced once everything is written. Its
        folder is created if necessary.
    - `model`: any PyTree. Leaves that are not arrays are left out.

    **Raises:**

    `OSError` if the file cannot be written; `ValueError` if two arrays have the same path,
    or one has a dtype that safetensors lacks, such as random keys.

    !!! Example

        ```python
        eqxshard.save_weights("model.safetensors", state.model)
        ```
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    path = Path(path)
    leaves, _ = partition_by_path(model)
    unknown = [name for name, x in leaves.items() if str(x.dtype) not in DTYPES.values()]
    if unknown:
        raise ValueError(
            f"{unknown[0]} has dtype {leaves[unknown[0]].dtype}, which safetensors does "
            "not have; cast it, or leave it out with equinox.filter."
        )
    # safetensors writes an array's memory as it is, whatever the strides.
    arrays = {name: np.asarray(fetch_whole(x), order="C") for name, x in leaves.items()}
    if not is_main_process():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    try:
        save_file(arrays, part)
        os.replace(part, path)
    except SafetensorError as error:
        raise OSError(f"{os.fspath(path)!r} could not be written: {error}.") from error
    finally:
        part.unlink(missing_ok=True)


def load_weights(
    path: str | os.PathLike[str],
    like: _T,
    shardings: PyTree[Sharding | None] = None,
    *,
    rename: Rename | None = None,
    transform: Transform | None = None,
    partial: bool = False,
) -> _T:
    r"""Read a model's arrays from a file, each device only its own part.

    The file may be of [safetensors](https://huggingface.co/docs/safetensors), of
    `torch.save` (a `state_dict`, or dicts of them, as torch writes since 1.6) or of
    `equinox.tree_serialise_leaves`. torch is not needed, and a pickle that asks for
    anything but tensors is refused: no code in a file is run.

    **Arguments:**

    - `path`: a file; or the index of several, such as `model.safetensors.index.json`; or
        the folder of either.
    - `like`: a model of arrays or of `jax.ShapeDtypeStruct`s, such as the `model` of
        [`eqxshard.abstract_state`][]. Floating-point types may differ from the file's.
    - `shardings`: the shardings of the arrays, such as from [`eqxshard.shardings`][]; a
        prefix of `like`. Where it is `None`, arrays are sharded like those of `like`.
    - `rename`: leads from the model to the file: from a path, such as
        `blocks.0.up.weight`, to the name there. A function of the path; or a mapping from
        regular expressions to replacements, which are applied in turn, as by `re.sub`.
        `None` instead of a name leaves the array as it is in `like`. A `*` in a name
        stands for the numbers from 0: the arrays `h.*.up.weight` are stacked along a
        first dim, as in the layers for [`eqxshard.scan_layers`][]. A function may also
        return a list of names: arrays with one dim less than the model's are stacked,
        others are concatenated along their first dim.
    - `transform`: `transform(path, array)` changes an array of the file before it is
        stacked, given the path in the model. The array is a NumPy view of the file, so
        transposing, slicing and splitting read nothing. (Arithmetic reads the array
        whole into the host's memory.) It is called once more before, for the shapes.
    - `partial`: let the model, the file, or both have arrays that the other does not have.
        They are named in a warning in the log.

    **Returns:**

    A model like `like`, with the arrays of the file. Those that are not read stay as they
    are in `like`.

    **Raises:**

    `FileNotFoundError` if a file is missing; `ValueError` if one is damaged or of an
    unknown format, or the arrays are not those of `like`: it names those that are
    missing, superfluous or of another shape. `TypeError` if `like` is a whole state, or
    `rename` returns something else.

    !!! Example

        ```python
        state = eqxshard.init_state(
            make_model,
            optim,
            key=key,
            mesh=mesh,
            rule=rule,
            load=lambda like: eqxshard.load_weights("model.safetensors", like),
        )
        ```
    """
    path = Path(path)
    wanted, static = partition_by_path(_check_model(like))
    arrays = map_weights(path, like)
    report, makers = match_weights(arrays, wanted, rename, transform)
    if faults := list_faults(report, partial=partial):
        raise ValueError(
            f"{os.fspath(path)} does not fit this model: {first_few(faults, '; ')}. Find "
            "the right rename= and transform= with compare_weights; partial=True leaves "
            "out arrays that only one of them has."
        )
    if (left_out := list_left_out(report)) and is_main_process():
        _log.warning(
            "%s: %d of the model's %d arrays are read; %s.",
            os.fspath(path),
            len(makers),
            len(wanted),
            "; ".join(left_out),
        )
    loaded = []
    targets = broadcast_prefix(shardings, like)
    for (name, leaf), target in zip(wanted.items(), targets, strict=True):
        if name in makers:
            there = target or target_sharding(leaf)
            if isinstance(there, NamedSharding):
                check_spec(name, leaf.shape, there.spec, there.mesh)
            what = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=there)
            loaded.append(_place(makers[name](), what))
        elif target is not None and isinstance(leaf, jax.Array):
            loaded.append(jax.device_put(leaf, target))
        else:
            loaded.append(leaf)
    return static.combine(loaded)


def compare_weights(
    path: str | os.PathLike[str],
    like: PyTree,
    *,
    rename: Rename | None = None,
    transform: Transform | None = None,
) -> WeightsReport:
    """Compare the names and shapes of a file's arrays with those of a model.

    Nothing is loaded, so this is the way to find the right `rename` and `transform`.

    **Arguments:**

    - `path`, `like`, `rename`, `transform`: as for [`eqxshard.load_weights`][].

    **Returns:**

    An [`eqxshard.WeightsReport`][].

    **Raises:**

    As [`eqxshard.load_weights`][] does, but not if the arrays are not those of `like`.

    !!! Example

        ```python
        like = eqx.filter_eval_shape(make_model, key)
        print(eqxshard.compare_weights("model.safetensors", like))
        ```
    """
    wanted, _ = partition_by_path(_check_model(like))
    return match_weights(map_weights(Path(path), like), wanted, rename, transform)[0]


def _check_model(like: _T) -> _T:
    if isinstance(like, TrainState):
        raise TypeError(
            "a TrainState is more than a model; load the weights when the state is made, "
            "with init_state(..., load=...), or into state.model."
        )
    return like


def _place(source: Source, what: jax.ShapeDtypeStruct) -> jax.Array:
    def read(part: tuple[range, ...]) -> np.ndarray:
        out = np.empty([len(dim) for dim in part], what.dtype)
        read_part(source, part, out)
        return out

    return place_parts(read, what)
