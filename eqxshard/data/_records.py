"""Sources of examples that are read one by one: files, or datasets of other libraries."""

import itertools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from jaxtyping import Int

from .._errors import UsageError, UsageTypeError
from ._buckets import stack_rows


class RecordSource:
    """Examples that are read one by one: files, an ArrayRecord, PyTorch, Hugging Face.

    If `records` has a method `__getitems__(indices)`, as sources of Grain and PyTorch may,
    one call of it reads all examples of a batch, or of several small ones, and threads
    share the decoding. Otherwise threads share both. If either is work in Python rather
    than waiting for a disk, the `workers` of [`eqxshard.Loader`][] help more.

    **Arguments:**

    - `records`: a dataset of Grain, PyTorch or Hugging Face (one split), or any other
        object with `__len__` and `__getitem__`.
    - `decode`: called with a record, returns a dict of arrays and numbers; by default,
        records must be that.
    - `threads`: the number of examples to read or decode at a time.

    **Raises:**

    `TypeError` if `records` has no length or no indices; `ValueError` if `threads` is not
    positive. While reading, `TypeError` if an example is not a dict, and `ValueError` if
    the examples of a batch differ in their names or shapes, but for the first dim of an
    entry: then it is ragged, for [`eqxshard.data.Buckets`][] or a transform to pad.

    Several examples are read before a batch is made of them, so each needs arrays of its
    own: the records and `decode` must not use theirs again.

    !!! Example

        ```python
        def decode(record):
            image, label = json.loads(record)
            return {"image": np.uint8(image), "label": label}


        def decode_image(file):
            with PIL.Image.open(file) as image:
                pixels = PIL.ImageOps.fit(image.convert("RGB"), (256, 256))
            return {"image": np.asarray(pixels), "label": classes.index(file.parent.name)}


        files = sorted(Path("imagenet/train").glob("*/*.JPEG"))
        classes = sorted({file.parent.name for file in files})
        source = eqxshard.data.RecordSource(files, decode_image)

        files = grain.sources.ArrayRecordDataSource(sorted(glob("train-*.arrayrecord")))
        source = eqxshard.data.RecordSource(files, decode)

        dataset = torchvision.datasets.CIFAR10(root, transform=to_tensor)
        source = eqxshard.data.RecordSource(
            dataset, lambda pair: {"image": pair[0], "label": pair[1]}
        )

        dataset = datasets.load_dataset("ylecun/mnist", split="train").with_format("numpy")
        source = eqxshard.data.RecordSource(dataset)
        ```
    """

    def __init__(
        self, records: Any, decode: Callable[[Any], Any] | None = None, *, threads: int = 16
    ):
        if not (hasattr(records, "__len__") and hasattr(records, "__getitem__")):
            raise UsageTypeError(
                f"a {type(records).__name__} cannot be read by index; give an object with "
                "__len__() and __getitem__(index), or use eqxshard.data.from_iterator."
            )
        if threads < 1:
            raise UsageError(f"threads={threads} must be at least 1.")
        self._records = records
        self._decode = decode
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_pool": None}

    def __len__(self) -> int:
        return len(self._records)

    def gather(self, indices: Int[np.ndarray, " n"]) -> dict[str, np.ndarray]:
        """The examples at some indices, in that order; indices may repeat."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, "eqxshard-records")
        get_many = getattr(self._records, "__getitems__", None)
        if get_many is not None:
            # Not in parts: such sources have threads of their own, or read in order.
            records, work = get_many(indices.tolist()), self._decode_all
        else:
            records, work = indices.tolist(), self._read
        size = -(-len(records) // self._threads)
        parts = (records[start : start + size] for start in range(0, len(records), size))
        examples = list(itertools.chain.from_iterable(self._pool.map(work, parts)))
        _check_alike(indices, examples)
        return {name: stack_rows([x[name] for x in examples]) for name in examples[0]}

    def _read(self, indices: list[int]) -> list[Any]:
        return self._decode_all([self._records[index] for index in indices])

    def _decode_all(self, records: list[Any]) -> list[Any]:
        return records if self._decode is None else list(map(self._decode, records))


def _check_alike(indices: Int[np.ndarray, " n"], examples: list[Any]) -> None:
    """Raise unless the examples are dicts of the same entries, of the same shapes."""
    first: dict[str, tuple[int, ...]] = {}
    for index, example in zip(indices, examples):
        if not isinstance(example, Mapping):
            raise UsageTypeError(
                f"example {index} is a {type(example).__name__}; use decode= to turn it "
                "into a dict of arrays, such as lambda pair: {'x': pair[0], 'y': pair[1]}."
            )
        shapes = {name: np.shape(entry) for name, entry in example.items()}
        first = first or shapes
        # But for the first dim, in which they may be ragged.
        if _but_first_dims(shapes) != _but_first_dims(first):
            raise UsageError(
                f"example {index} has the entries {shapes}, and example {indices[0]} "
                f"{first}; give all examples the same entries, padded or cropped to the "
                "same shapes, in the dataset or with decode=."
            )


def _but_first_dims(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[Any, ...]]:
    return {name: (len(shape), *shape[1:]) for name, shape in shapes.items()}
