"""What Orbax needs to find beside arrays, to read a checkpoint as if it were its own.

Orbax itself does not write them. Its threads wait for one another for minutes where one
process may not write, and it takes 2 ms for each array, of which a network of 400 layers
has 2,400 with the state of its optimizer.
"""

import base64
import contextlib
import json
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

#: The folder of the arrays, in that of a checkpoint.
STATE = "state"
_INLINE_BYTES, _FILE_BYTES = 2**12, 2**28


def ocdbt(folder: Any) -> dict[str, Any]:
    """How TensorStore names the database of arrays in a local folder."""
    return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/"}}


def part_of_process(folder: Any, save: str) -> dict[str, Any]:
    """The database that this process writes, in the folder of a checkpoint."""
    part = f"ocdbt.process_{jax.process_index()}_crc32c_{save}"
    return {
        **ocdbt(folder / STATE / part),
        # What describes the arrays is in the tables, and these are in files of their own,
        # so that those of `d` have nothing but chunks.
        "config": {"max_inline_value_bytes": _INLINE_BYTES},
        "value_data_prefix": "d/",
        "btree_node_data_prefix": "tables/",
        "version_tree_node_data_prefix": "tables/",
        # Several files, of which threads write one each.
        "target_data_file_size": _FILE_BYTES,
    }


def complete(folder: Any, save: str, shardings: Mapping[str, Sharding]) -> None:
    """Make the parts of all processes one state.

    **Arguments:**

    - `folder`: the folder of a checkpoint, to which all processes have written.
    - `save`: the name of the save.
    - `shardings`: the shardings of the arrays by path.
    """
    state = folder / STATE
    _merge(state, save)
    (state / "_METADATA").write_text(json.dumps(_tree(shardings)))
    # Without it, Orbax has to be told where to place the arrays.
    with contextlib.suppress(ImportError, AttributeError):
        (state / "_sharding").write_text(_describe(shardings))
    # Orbax finds out by itself which of its handlers reads the state.
    (folder / "_CHECKPOINT_METADATA").write_text(json.dumps({"item_handlers": {}}))
    (folder / "orbax.checkpoint").touch()


def _merge(state: Any, save: str) -> None:
    """One database that refers to those of the processes."""
    import tensorstore as ts

    settings = ts.Context()
    whole = ts.KvStore.open(ocdbt(state), context=settings).result()
    transaction = ts.Transaction(atomic=True)
    copies = [
        ts.KvStore.open(ocdbt(part), context=settings)
        .result()
        .experimental_copy_range_to(whole.with_transaction(transaction))
        # Not `glob`, which the folder's own name could mislead.
        for part in state.iterdir()
        if part.name.startswith("ocdbt.process_") and part.name.endswith(f"_{save}")
    ]
    for copy in copies:
        copy.result()
    transaction.commit_sync()


def _tree(paths: Mapping[str, Any]) -> dict[str, Any]:
    """How Orbax describes a dict of arrays."""
    leaf = {"value_type": "jax.Array", "skip_deserialize": False}
    return {
        "tree_metadata": {
            str((path,)): {
                "key_metadata": [{"key": path, "key_type": 2}],
                "value_metadata": leaf,
            }
            for path in paths
        },
        "use_ocdbt": True,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }


def _describe(shardings: Mapping[str, Sharding]) -> str:
    """What Orbax reads to place arrays as they were, if it is not told where to."""
    from orbax.checkpoint.metadata import (
        NamedShardingMetadata,
        SingleDeviceShardingMetadata,
    )

    kinds: dict[type[Sharding], Any] = {
        NamedSharding: NamedShardingMetadata,
        SingleDeviceSharding: SingleDeviceShardingMetadata,
    }
    described = {
        sharding: kind.from_jax_sharding(sharding).to_serialized_string()
        for sharding in set(shardings.values())
        if (kind := kinds.get(type(sharding))) is not None
    }
    return json.dumps(
        {
            base64.urlsafe_b64encode(path.encode()).decode(): described[sharding]
            for path, sharding in shardings.items()
            if sharding in described
        }
    )
