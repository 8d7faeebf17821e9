"""Datasets of Hugging Face as sources. Their library is not imported here."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int


class HuggingFaceSource:
    """A dataset of [Hugging Face](https://huggingface.co/docs/datasets), read by columns.

    Each batch is one call, `dataset[indices]`, in the format `"numpy"`; but if the dataset
    has a transform of its own (`with_transform`), that makes the batch. Integers get the
    dtype that the dataset declares, such as uint8 for images.

    Columns of strings, or of lists of different lengths, need a `transform` of the
    [`eqxshard.Loader`][] that makes numbers of them, such as a tokenizer; or drop them,
    with `dataset.remove_columns(...)`. In columns of floats, None becomes nan.

    **Arguments:**

    - `dataset`: a `datasets.Dataset`, one split.

    **Raises:**

    `TypeError` if it is something else, such as all splits or a stream. While reading,
    `ValueError` if a column of integers has None.

    !!! Example

        ```python
        dataset = datasets.load_dataset("ylecun/mnist", split="train")
        source = eqxshard.data.HuggingFaceSource(dataset)
        ```
    """

    def __init__(self, dataset: Any):
        kind = type(dataset).__name__
        if isinstance(dataset, Mapping):
            raise TypeError(
                f"a {kind} holds several splits ({', '.join(dataset)}); give one of them, "
                "such as dataset['train']."
            )
        if not hasattr(dataset, "with_format"):
            raise TypeError(
                f"a {kind} is not a dataset of Hugging Face; give a datasets.Dataset."
            )
        if not hasattr(dataset, "__len__"):
            raise TypeError(
                f"a {kind} cannot be read by index; load it without streaming=True, or use "
                "eqxshard.data.from_iterator."
            )
        self._integers: dict[str, np.dtype] = {}
        if dataset.format["type"] != "custom":
            columns = dataset.format["columns"]
            dataset = dataset.with_format("numpy", columns=columns)
            dtypes = {name: _dtype(dataset.features[name]) for name in columns}
            self._integers = {n: np.dtype(d) for n, d in dtypes.items() if "int" in d}
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def gather(self, indices: Int[np.ndarray, " n"]) -> dict[str, np.ndarray]:
        """The examples at some indices, in that order; indices may repeat."""
        batch = self._dataset[indices]
        arrays = {name: np.asarray(column) for name, column in batch.items()}
        for name, dtype in self._integers.items():
            # The format makes int64 of all integers, or floats or objects if one is None.
            if arrays[name].dtype.kind in "iu":
                arrays[name] = arrays[name].astype(dtype)
            else:
                _check_complete(name, arrays[name], indices)
        return arrays


def _dtype(feature: Any) -> str:
    """The name of a column's dtype, or of its innermost lists'."""
    while hasattr(feature, "feature"):
        feature = feature.feature
    return str(getattr(feature, "dtype", ""))


def _check_complete(name: str, column: np.ndarray, indices: Int[np.ndarray, " n"]) -> None:
    for index, item in zip(indices, column):
        if item is None or np.any(np.not_equal(item, item)):
            raise ValueError(
                f"column {name!r} has None in example {index}; fill it in with "
                "dataset.map, or drop such examples with dataset.filter."
            )
