"""The database of arrays in a local folder, which TensorStore writes."""

from typing import Any

import jax

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


def merge(folder: Any, save: str) -> None:
    """Make one database, which refers to those that all processes have written.

    **Arguments:**

    - `folder`: the folder of a checkpoint.
    - `save`: the name of the save.
    """
    import tensorstore as ts

    state = folder / STATE
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
