"""Datasets of Hugging Face, where it is installed."""

import pickle

import numpy as np
import pytest
from loader_helpers import loader_of, rows, take

from eqxshard.data import HuggingFaceSource


@pytest.fixture
def datasets():
    return pytest.importorskip("datasets")


def dataset_of(datasets, **columns):
    return datasets.Dataset.from_dict({"x": list(range(20)), **columns})


def test_columns_are_gathered_as_arrays(datasets):
    image = np.arange(20 * 6, dtype=np.uint8).reshape(20, 2, 3)
    dataset = dataset_of(datasets, image=image, f=[0.5] * 20)
    source = pickle.loads(pickle.dumps(HuggingFaceSource(dataset.with_format("pandas"))))
    batch = source.gather(np.array([7, 3, 7]))
    assert len(source) == 20
    assert batch["x"].tolist() == [7, 3, 7]
    np.testing.assert_array_equal(batch["image"], image[[7, 3, 7]])
    assert batch["image"].dtype == np.uint8 and batch["f"].dtype == np.float32


def test_integers_have_the_dtype_that_is_declared(datasets):
    image = np.arange(20 * 6, dtype=np.uint8).reshape(20, 2, 3)
    dataset = dataset_of(datasets, a=image, b=image.tolist(), c=[1] * 20)
    dataset = dataset.cast_column("a", datasets.Array2D((2, 3), "uint8"))
    lists = datasets.List(datasets.List(datasets.Value("uint8")))
    dataset = dataset.cast_column("b", lists).cast_column("c", datasets.Value("int16"))
    batch = HuggingFaceSource(dataset).gather(np.array([7, 3]))
    assert batch["a"].dtype == batch["b"].dtype == np.uint8
    assert batch["c"].dtype == np.int16
    np.testing.assert_array_equal(batch["a"], image[[7, 3]])
    np.testing.assert_array_equal(batch["b"], image[[7, 3]])


def test_a_loader_reads_them(datasets):
    first, *_, last = take(loader_of(HuggingFaceSource(dataset_of(datasets)), epochs=1))
    assert len(rows(first)) == 8 and len(rows(last)) == 4


def test_chosen_columns_and_transforms_are_kept(datasets):
    dataset = dataset_of(datasets, text=["a"] * 20)
    chosen = HuggingFaceSource(dataset.with_format("numpy", columns=["x"]))
    assert list(chosen.gather(np.arange(2))) == ["x"]
    doubled = dataset.with_transform(lambda batch: {"y": [2 * x for x in batch["x"]]})
    assert HuggingFaceSource(doubled).gather(np.arange(3))["y"].tolist() == [0, 2, 4]


@pytest.mark.parametrize(
    "column, says",
    [
        (
            [[1]] + [[1, 2]] * 19,
            "'c' is of type object, which devices cannot",
        ),
        (["a"] * 20, "'c' is of type <U1, which devices cannot hold; use a transform"),
        (
            [True, None] * 10,
            "'c' is of type object, which devices cannot",
        ),
        ([1, 2, None] + [3] * 17, "column 'c' has None in example 2; fill it in with"),
    ],
)
def test_columns_that_are_not_arrays_are_errors(datasets, column, says):
    source = HuggingFaceSource(dataset_of(datasets, c=column))
    with pytest.raises((TypeError, ValueError), match=says):
        list(loader_of(source, shuffle=False, epochs=1))


def test_splits_and_streams_are_errors(datasets):
    dataset = dataset_of(datasets)
    splits = datasets.DatasetDict({"train": dataset, "test": dataset})
    with pytest.raises(
        TypeError, match=r"DatasetDict holds several splits \(train, test\)"
    ):
        HuggingFaceSource(splits)
    with pytest.raises(TypeError, match="IterableDataset cannot be read by index; load it"):
        HuggingFaceSource(dataset.to_iterable_dataset())


def test_another_object_is_not_a_dataset_of_hugging_face():
    with pytest.raises(
        TypeError, match=r"a list is not a dataset of .*; give a datasets\."
    ):
        HuggingFaceSource([1, 2, 3])
