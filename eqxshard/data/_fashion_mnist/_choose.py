"""Fashion-MNIST, or the generated replacement if it is not available."""

import os
from typing import Literal

from .._sources import ArraySource
from ._load import fashion_mnist
from ._synthetic import synthetic_fashion

_WARNING = (
    "Training on generated images, NOT on Fashion-MNIST: accuracies say nothing about the "
    "real data.\n\n"
)


def load_fashion_mnist(
    data: Literal["auto", "fashion_mnist", "synthetic"] = "auto",
    *,
    data_dir: str | os.PathLike[str] | None = None,
) -> tuple[ArraySource, ArraySource]:
    """The training and test data of Fashion-MNIST, or of its generated replacement.

    **Arguments:**

    - `data`: `"fashion_mnist"` for the real data, `"synthetic"` for
        [`eqxshard.data.synthetic_fashion`][], `"auto"` for the latter only if the real
        data are not available. Synthetic data have a `warning`, which
        [`eqxshard.train`][] shows.
    - `data_dir`: as for [`eqxshard.data.fashion_mnist`][].

    **Returns:**

    Two [`eqxshard.data.ArraySource`][]s of `"image"` and `"label"`.

    **Raises:**

    As [`eqxshard.data.fashion_mnist`][] does; `ValueError` if `data` is not one of these.

    !!! Example

        ```python
        train_data, test_data = eqxshard.data.load_fashion_mnist("synthetic")
        ```
    """
    if data not in ("auto", "fashion_mnist", "synthetic"):
        raise ValueError(f"data={data!r} is not 'auto', 'fashion_mnist' or 'synthetic'.")
    reason = "Requested with data='synthetic'."
    if data != "synthetic":
        try:
            train = fashion_mnist("train", data_dir=data_dir)
            return train, fashion_mnist("test", data_dir=data_dir)
        except FileNotFoundError as error:
            if data == "fashion_mnist":
                raise
            reason = str(error)
    train, test = synthetic_fashion("train"), synthetic_fashion("test")
    train.warning = test.warning = _WARNING + reason
    return train, test
