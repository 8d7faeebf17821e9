import pickle
import threading
import tracemalloc

import grain
import jax.numpy as jnp
import numpy as np
import pytest

import eqxshard
from eqxshard.data import RecordSource


def test_gather_returns_rows_in_the_order_of_the_indices():
    image = np.arange(24, dtype=np.uint8).reshape(6, 2, 2)
    label = np.arange(6, dtype=np.int32) * 10
    source = eqxshard.data.ArraySource({"image": image, "label": label})
    batch = source.gather(np.array([4, 0, 4]))
    assert len(source) == 6
    assert batch["image"].dtype == np.uint8
    np.testing.assert_array_equal(batch["image"], image[[4, 0, 4]])
    np.testing.assert_array_equal(batch["label"], [40, 0, 40])


@pytest.mark.parametrize("view", [lambda x: x.swapaxes(1, 2), lambda x: x[::2]])
def test_gather_from_a_view_does_not_copy_all_of_it(view):
    image = view(np.arange(2**20, dtype=np.int32).reshape(2**12, 16, 16))
    source = eqxshard.data.ArraySource({"image": image})
    tracemalloc.start()
    batch = source.gather(np.array([7, 3]))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    np.testing.assert_array_equal(batch["image"], [image[7], image[3]])
    assert peak < image.nbytes / 10


@pytest.mark.parametrize("count", [1, 64, 257])
def test_large_batches_are_where_cpu_devices_can_share_them(count):
    images = np.arange(300 * 4096, dtype=np.int32).reshape(300, 64, 64)
    source = eqxshard.data.ArraySource({"x": images})
    indices = np.arange(count)[::-1]
    # Alive, so that each has memory of its own.
    gathered = [source.gather(indices)["x"] for _ in range(8)]
    for rows in gathered:
        np.testing.assert_array_equal(rows, images[indices])
        assert rows.ctypes.data % 64 == 0 or rows.nbytes < 2**16


@pytest.mark.parametrize("row_bytes", [1, 2**16])
def test_gather_beyond_the_last_row_is_an_error(row_bytes):
    source = eqxshard.data.ArraySource({"x": np.zeros((3, row_bytes), np.uint8)})
    with pytest.raises(IndexError):
        source.gather(np.array([3]))


def test_what_are_not_arrays_of_examples_by_name_is_an_error(unannotated):
    for arrays, error, says in (
        ({"x": np.array(3.0)}, ValueError, r"the shapes \{'x': \(\)\}; give at least"),
        ({}, ValueError, "give at least one array"),
        ({"x": np.ones(2), "y": np.ones(3)}, ValueError, "the same first dim"),
        ([np.zeros(3)], TypeError, "got a list; give a dict"),
    ):
        with pytest.raises(error, match=says):
            eqxshard.data.ArraySource(arrays)  # pyright: ignore[reportArgumentType]


def test_lists_and_jax_arrays_are_converted():
    source = eqxshard.data.ArraySource(
        {"x": [[1, 2], [3, 4]], "y": jnp.array([5, 6], jnp.bfloat16)}
    )
    batch = source.gather(np.array([1]))
    assert batch["x"].tolist() == [[3, 4]]
    assert batch["y"].tolist() == [6]


# Examples that are read one by one


class Squares:
    """Numbers and their squares."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return {"x": index, "xx": np.array([index, index**2], np.float32)}


def test_records_are_read_in_threads():
    together, seen = threading.Barrier(4), []

    class Records(Squares):
        def __getitem__(self, index):
            seen.append((index, threading.get_ident()))
            together.wait(timeout=60)
            return super().__getitem__(index)

    RecordSource(Records(), threads=4).gather(np.arange(8))
    indices, threads = zip(*seen)
    assert sorted(indices) == list(range(8)) and len({*threads}) == 4


def test_records_may_be_decoded_and_a_source_pickled():
    source = pickle.loads(pickle.dumps(RecordSource(["a", "bbb", "cc"], decode_length)))
    assert source.gather(np.array([1, 2]))["length"].tolist() == [3, 2]


def decode_length(text):
    return {"length": len(text)}


def test_datasets_of_other_libraries_are_records():
    grain_source = grain.sources.RangeDataSource(0, 10, 1)
    source = RecordSource(grain_source, lambda x: {"x": x})
    assert source.gather(np.array([4, 2]))["x"].tolist() == [4, 2]
    # As PyTorch has them.
    pairs = [(i, np.full((2, 3), i, np.uint8)) for i in range(20)]
    source = RecordSource(pairs, lambda pair: {"x": pair[0], "image": pair[1]})
    batch = source.gather(np.array([7, 3, 7]))
    assert batch["x"].tolist() == [7, 3, 7]
    assert batch["image"].shape == (3, 2, 3) and batch["image"].dtype == np.uint8


def test_datasets_of_hugging_face_are_records():
    datasets = pytest.importorskip("datasets")
    image = np.arange(20 * 6, dtype=np.uint8).reshape(20, 2, 3)
    dataset = datasets.Dataset.from_dict({"x": list(range(20)), "image": image})
    source = RecordSource(
        dataset.with_format("numpy"), lambda x: {**x, "image": x["image"].astype(np.uint8)}
    )
    batch = source.gather(np.array([7, 3, 7]))
    assert batch["x"].tolist() == [7, 3, 7] and batch["image"].dtype == np.uint8
    np.testing.assert_array_equal(batch["image"], image[[7, 3, 7]])


@pytest.mark.parametrize(
    "records, decode, says",
    [
        ([1, 2], None, "example 0 is a int; use decode="),
        ([1, 2], lambda x: {"a": 1, f"b{x}": 1}, r"1 has the entries .*'b2'.*; give all"),
        (
            [1, 2],
            lambda x: {"a": np.ones((1, x))},
            r"1 has .*\(1, 2\)}, and example 0 .*; g",
        ),
        (
            [0, 1],
            lambda x: {"a": np.ones((2,) * x)},
            r"1 has .*\(2,\)}, and example 0 .*; g",
        ),
    ],
)
def test_records_that_cannot_be_stacked_are_errors(records, decode, says):
    with pytest.raises((TypeError, ValueError), match=says):
        RecordSource(records, decode).gather(np.arange(2))


def test_records_may_be_ragged_in_their_first_dim():
    source = RecordSource([2, 0, 3], lambda x: {"a": np.ones((x, 2), np.int32), "x": x})
    batch = source.gather(np.array([2, 1]))
    assert batch["a"].dtype == object and batch["x"].tolist() == [3, 0]
    assert [row.shape for row in batch["a"]] == [(3, 2), (0, 2)]
    assert source.gather(np.array([0, 0]))["a"].shape == (2, 2, 2)


def test_invalid_records_and_threads_are_errors(unannotated):
    with pytest.raises(TypeError, match="a generator cannot be read by index; give an obj"):
        RecordSource(x for x in [1])  # pyright: ignore
    with pytest.raises(ValueError, match="threads=0 must be at least 1"):
        RecordSource([{"x": 1}], threads=0)


def test_records_are_read_together_if_possible():
    class Together(Squares):
        def __getitem__(self, index):
            raise AssertionError("one by one")

        def __getitems__(self, indices):
            calls.append(len(indices))
            return [Squares.__getitem__(self, index) for index in indices]

    calls: list[int] = []
    indices = np.array([3, 1, 3, 7, 9, 0])
    batch = RecordSource(Together(), threads=2).gather(indices)
    alone = RecordSource(Squares(), threads=2).gather(indices)
    assert calls == [6]
    assert batch.keys() == alone.keys()
    for name in alone:
        np.testing.assert_array_equal(batch[name], alone[name])
