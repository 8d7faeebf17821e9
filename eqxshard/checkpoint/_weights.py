"""A model's weights in files that other libraries read and write."""

import functools
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import jax
from jax.sharding import NamedSharding, Sharding
from jaxtyping import PyTree

from ..distributed import is_main_process
from ..sharding._paths import local_path
from ..sharding._placement import broadcast_prefix
from ..sharding._spec import check_spec
from ..sharding._text import first_few
from ..training._donation import check_state_not_donated
from ..training._state import TrainState
from ._arrays import partition_by_path, place_parts, target_sharding
from ._weight_files import map_weights
from ._weight_matching import WeightsReport, list_faults, match_weights
from ._weight_names import Rename, Transform
from ._weight_writing import outgoing, write_weights

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


def save_weights(
    path: str | os.PathLike[str],
    model: PyTree,
    *,
    rename: Rename | None = None,
    transform: Transform | None = None,
    max_bytes: int | None = None,
) -> None:
    r"""Write a model's arrays to a safetensors file (Hugging Face).

    Each array is named by its path, such as `layers.0.weight`, and written whole, however
    it is sharded. With several processes, all must call this, and process 0 writes.

    Other libraries have other names and layouts: `rename` and `transform` are the inverse
    of those for [`eqxshard.load_weights`][].

    **Arguments:**

    - `path`: the file, `*.safetensors`, which is replaced once everything is written. Its
        folder is created if necessary.
    - `model`: any PyTree. Leaves that are not arrays are left out.
    - `rename`: from the path of an array in the model to its name in the file: a function,
        or a mapping from regular expressions to replacements. `None` leaves the array
        out. A `*` stands for the numbers from 0 along the first dim: under `h.*.weight`
        each layer of stacked layers is an array of its own. A function may also return a
        list of names, for an array that `transform` divides.
    - `transform`: `transform(path, array)` changes an array, one layer for a `*`, before
        it is written; where there is a list of names, it returns a list of arrays.
    - `max_bytes`: where there are more bytes of arrays, they are written to several files,
        `model-00001-of-00003.safetensors` and so on for `model.safetensors`, with an index
        beside them. Arrays are fetched as they are written, so the host needs memory for
        one file and one array, not for the model.

    **Raises:**

    `OSError` if a file cannot be written; `ValueError` if two arrays have the same path or
    name, one has a dtype that safetensors lacks, such as random keys, or the model was
    donated to a step.

    !!! Example

        ```python
        eqxshard.save_weights("model.safetensors", state.model)
        ```
    """
    if max_bytes is not None and max_bytes < 1:
        raise ValueError(f"max_bytes must be positive, got {max_bytes}.")
    check_state_not_donated(model)
    leaves, _ = partition_by_path(model)
    write_weights(
        local_path(path, "the file of weights"),
        outgoing(leaves, rename, transform),
        max_bytes,
    )


def load_weights(
    path: str | os.PathLike[str],
    like: _T,
    shardings: PyTree[Sharding | None] = None,
    *,
    rename: Rename | None = None,
    transform: Transform | None = None,
    partial: bool = False,
    ignore: str | Sequence[str] = (),
) -> _T:
    r"""Read a model's arrays from a file, each device only its own part.

    The file may be of [safetensors](https://huggingface.co/docs/safetensors), of
    `equinox.tree_serialise_leaves`, or of `torch.save` (a `state_dict`, or dicts of them),
    which takes torch to read. No code in a file is run.

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
        return a list of names, for arrays that `transform` joins.
    - `transform`: `transform(path, array)` changes an array of the file before it is
        stacked, given the path in the model; where there is a list of names, it gets the
        list of arrays, and returns one. The arrays are NumPy views of the file, so
        transposing, slicing and splitting read nothing. (Arithmetic and joining read the
        arrays of one layer whole into the host's memory.) It is called once more before,
        for the shapes.
    - `partial`: let the model, the file, or both have arrays that the other does not have.
        They are named in a warning in the log.
    - `ignore`: a regular expression, or several, for the names of arrays that the file may
        have and the model does not need, such as the causal masks of GPT-2. Other arrays
        that only the file has are still an error.

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
    report, sources = match_weights(arrays, wanted, rename, transform, ignore)
    if faults := list_faults(report, partial=partial):
        raise ValueError(
            f"{os.fspath(path)} does not fit this model: {first_few(faults, '; ')}. Find "
            "the right rename= and transform= with compare_weights; partial=True leaves "
            "out arrays that only one of them has, ignore= some that only the file has."
        )
    left_out = []
    if report.missing:
        left_out.append(f"the model keeps its own {first_few([*report.missing])}")
    if report.unused:
        left_out.append(f"the file's {first_few([*report.unused])} are not used")
    if left_out and is_main_process():
        _log.warning(
            "%s: %d of the model's %d arrays are read; %s.",
            os.fspath(path),
            len(sources),
            len(wanted),
            "; ".join(left_out),
        )
    loaded = []
    targets = broadcast_prefix(shardings, like)
    for (name, leaf), target in zip(wanted.items(), targets, strict=True):
        if name in sources:
            there = target or target_sharding(leaf)
            if isinstance(there, NamedSharding):
                check_spec(name, leaf.shape, there.spec, there.mesh)
            what = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=there)
            read = functools.partial(sources[name].read, dtype=leaf.dtype)
            loaded.append(place_parts(read, what))
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
    ignore: str | Sequence[str] = (),
) -> WeightsReport:
    """Compare the names and shapes of a file's arrays with those of a model.

    Nothing is loaded, so this is the way to find the right `rename` and `transform`.

    **Arguments:**

    - `path`, `like`, `rename`, `transform`, `ignore`: as for [`eqxshard.load_weights`][].

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
    arrays = map_weights(Path(path), like)
    return match_weights(arrays, wanted, rename, transform, ignore)[0]


def _check_model(like: _T) -> _T:
    if isinstance(like, TrainState):
        raise TypeError(
            "a TrainState is more than a model; load the weights when the state is made, "
            "with init_state(..., load=...), or into state.model."
        )
    return like
