from contextlib import closing

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_helpers import MESHES, flat, loader_of, mesh_of, numbers, read, rows

import eqxshard

# The order


@settings(deadline=None, max_examples=200)
@given(
    n=st.integers(1, 70),
    mesh=st.sampled_from(MESHES),
    per_device=st.integers(1, 3),
    epochs=st.integers(1, 3),
    remainder=st.sampled_from(["pad", "drop"]),
    shuffle=st.booleans(),
    prefetch=st.integers(0, 3),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_each_example_counts_once_per_epoch_from_any_step(
    n, mesh, per_device, epochs, remainder, shuffle, prefetch, seed, data
):
    batch_size = 8 * per_device
    if remainder == "drop":
        n += batch_size
    loader = loader_of(
        numbers(n),
        mesh=mesh,
        batch_size=batch_size,
        epochs=epochs,
        remainder=remainder,
        shuffle=shuffle,
        prefetch=prefetch,
        seed=seed,
    )
    length = len(loader)
    batches = read(loader)
    assert length == (n // batch_size if remainder == "drop" else -(-n // batch_size))
    assert len(batches) == epochs * length
    for epoch in range(epochs):
        seen = flat(batches[epoch * length : (epoch + 1) * length])
        assert len(seen) == len(set(seen)) == min(n, length * batch_size)
        assert set(seen) <= set(range(n))
        if not shuffle:
            assert seen == sorted(seen)
    step = data.draw(st.integers(0, len(batches) - 1))
    loader.seek(step)
    assert read(loader) == batches[step:]


def test_the_order_never_changes():
    first, second = read(loader_of(numbers(10), batch_size=10, epochs=2))
    assert first == [2, 4, 0, 3, 5, 1, 9, 7, 8, 6]
    assert second == [3, 4, 0, 1, 6, 9, 5, 8, 7, 2]


# Batches


def test_weights_of_the_source_are_kept_and_those_of_padding_are_0():
    source = eqxshard.data.ArraySource(
        {"__loss_weight__": np.arange(1.0, 11), "__weight__": np.linspace(1, 2, 10)}
    )
    first, last = loader_of(source, shuffle=False, epochs=1)
    assert first["__weight__"].dtype == last["__weight__"].dtype == np.float32
    np.testing.assert_allclose(first["__weight__"], np.linspace(1, 2, 10)[:8], rtol=1e-6)
    expected = [17 / 9, 2, 0, 0, 0, 0, 0, 0]
    np.testing.assert_allclose(last["__weight__"], expected, rtol=1e-6)
    # Padding repeats the first example.
    assert np.asarray(last["__loss_weight__"]).tolist() == [9, 10, 1, 1, 1, 1, 1, 1]


def test_padding_has_weight_0_even_if_the_source_has_nan():
    source = eqxshard.data.ArraySource({"__weight__": np.array([np.nan] + [1.0] * 8)})
    loader = loader_of(source, shuffle=False, epochs=1)
    with pytest.raises(ValueError, match=r"'__weight__' is nan, .* row 0; give"):
        next(iter(loader))
    # Padding repeats the first example.
    loader.seek(1)
    (last,) = loader
    assert np.asarray(last["__weight__"]).tolist() == [1, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "examples, remainder", [(16, "pad"), (16, "error"), (16, "drop"), (20, "drop")]
)
@pytest.mark.parametrize("placement", ["host", "device"])
def test_without_padding_there_are_no_weights(examples, remainder, placement):
    options = {"remainder": remainder, "placement": placement, "epochs": 1}
    assert [list(batch) for batch in loader_of(numbers(examples), **options)] == [["x"]] * 2


def test_a_transform_gets_whole_batches():
    def transform(batch):
        assert batch["x"].shape == (8,)
        return {"x": batch["x"] * 2, "square": batch["x"] ** 2}

    loader = loader_of(numbers(12), transform=transform, shuffle=False, epochs=1)
    first, last = loader
    assert sorted(last) == ["__weight__", "square", "x"]
    assert np.asarray(first["square"]).tolist() == [i**2 for i in range(8)]
    assert rows(last) == [16, 18, 20, 22]


def test_an_example_that_fills_a_batch_up_is_read_once():
    read: list[int] = []

    def example(i):
        read.append(int(i))
        return {"x": np.int32(i)}

    dataset = grain.MapDataset.range(9).map(example)
    loader = loader_of(dataset, epochs=1, prefetch=0)
    read.clear()
    assert [len(rows(batch)) for batch in loader] == [8, 1]
    assert read == [*range(9), 0]


# Memory


def memory(rows):
    """Memory that a CPU device of JAX would share: large, and aligned to 64 bytes."""
    count = rows * 4096
    raw = np.empty(4 * count + 64, np.uint8)
    return np.ndarray((rows, 4096), np.int32, raw, -raw.ctypes.data % 64)


class Refilled:
    """A source whose example i is full of i, and which has one buffer."""

    def __init__(self):
        # The loader may ask for several batches at once.
        self.buffer = memory(128)

    def __len__(self):
        return 64

    def gather(self, indices):
        rows = self.buffer[: len(indices)]
        rows[:] = indices[:, None]
        return {"x": rows}


def doubled_in_place(batch):
    batch["x"] *= 2
    return batch


BUFFER = memory(8)


def doubled_in_one_buffer(batch):
    np.multiply(batch["x"], 2, out=BUFFER)
    return {"x": BUFFER}


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("transform", [None, doubled_in_place, doubled_in_one_buffer])
def test_sources_and_transforms_may_use_their_arrays_again(prefetch, transform):
    options: dict = {"transform": transform, "prefetch": prefetch, "shuffle": False}
    loader = loader_of(Refilled(), epochs=2, **options)
    expected = np.repeat(np.arange(64), 4096).reshape(8, 8, 4096)
    expected = np.concatenate([expected] * 2) * (1 if transform is None else 2)
    # All are kept before any is looked at.
    for batch, x in zip(list(loader), expected, strict=True):
        np.testing.assert_array_equal(batch["x"], x)


def test_a_transform_may_use_its_arrays_again_where_many_threads_read():
    dataset = grain.MapDataset.range(512).map(lambda i: {"x": np.full(4096, i, np.int32)})
    options: dict = {"transform": doubled_in_one_buffer, "shuffle": True}
    batches = [*loader_of(dataset, epochs=1, **options)]
    found = np.stack([batch["x"] for batch in batches]).reshape(512, 4096)
    np.testing.assert_array_equal(found, 2 * np.arange(512)[:, None].repeat(4096, 1))


@pytest.mark.parametrize("placement", ["host", "device"])
def test_what_a_source_returns_stays_as_it_is(placement):
    class Whole(Refilled):
        """Returns its own memory, where that is what is asked for."""

        def gather(self, indices):
            return {"x": self.buffer[indices[0] : indices[0] + len(indices)]}

    source = Whole()
    source.buffer[:] = np.arange(128)[:, None]
    options: dict = {"placement": placement, "batch_size": 64, "shuffle": False}
    if placement == "host":
        options |= {"transform": doubled_in_place, "epochs": 2, "batch_size": 8}
        first, second = np.split(
            np.stack([b["x"] for b in loader_of(source, **options)]), 2
        )
        np.testing.assert_array_equal(first, second)
        np.testing.assert_array_equal(source.buffer[:, 0], np.arange(128))
    else:
        loader = loader_of(source, **options)
        source.buffer[:] = -1
        np.testing.assert_array_equal(next(iter(loader))["x"][:, 0], np.arange(64))


# Mistakes


def test_batches_of_one_graph_are_refused_with_a_remedy():
    graph = {"nodes": np.ones((8, 3)), "edges": np.ones((16, 2)), "count": np.ones(2)}
    mesh = mesh_of(count=1)

    class Graphs(Refilled):
        def gather(self, indices):
            return graph

    says = r"pad each to the same numbers of nodes and edges, stack them, and use jax\.vmap"
    with pytest.raises(ValueError, match=says):
        next(iter(loader_of(Graphs())))
    batches = eqxshard.Loader([graph], mesh=mesh)
    with pytest.raises(ValueError, match=says):
        next(iter(batches))
    step = eqxshard.make_eval_step(lambda model, batch: {"nodes": batch["nodes"][:, 0]})
    model = eqxshard.filter_shard({"w": jnp.ones(1)}, jax.NamedSharding(mesh, jax.P()))
    with pytest.raises(ValueError, match=f"leading dims: examples .for graphs, .*{says}"):
        step(model, graph)


def test_the_wrong_number_of_rows_is_an_error():
    class Short:
        def __len__(self):
            return 100

        def gather(self, indices):
            return {"x": indices, "label": indices[1:]}

    with pytest.raises(ValueError, match=r"gather returned 'label' of shape \(7,\) for 8"):
        list(loader_of(Short()))
    with pytest.raises(ValueError, match=r"transform returned 'y' of shape \(\) for 8"):
        list(loader_of(numbers(8), transform=lambda b: {"y": b["x"].sum()}))


def test_what_devices_cannot_hold_is_an_error(unannotated):
    records = np.zeros(8, [("a", np.int32), ("b", np.float32)])
    for name, array in {"file": np.array(["a.png"] * 8), "record": records}.items():
        with pytest.raises(TypeError, match=f"'{name}' is a NumPy array of dtype "):
            list(loader_of(eqxshard.data.ArraySource({name: array})))
    masked = np.ma.masked_equal(np.arange(8), 3)
    examples = grain.MapDataset.source([*masked]).map(lambda x: {"x": np.ma.array([x])})
    for make in (
        lambda: loader_of({"x": masked}),
        lambda: loader_of(numbers(8), transform=lambda batch: {"x": masked}),
        lambda: eqxshard.Loader([{"x": masked}], mesh=mesh_of(count=1)),
        lambda: loader_of(examples),
    ):
        with pytest.raises(TypeError, match="'x' is a masked array, and JAX has no masks;"):
            next(iter(make()))
    with pytest.raises(TypeError, match="transform returned None; return a dict"):
        list(loader_of(numbers(8), transform=lambda batch: None))
    with pytest.raises(ValueError, match="transform returned a dict without entries; ret"):
        list(loader_of(numbers(9), transform=lambda batch: {}))
    source = eqxshard.data.ArraySource({"__weight__": np.ones((9, 2), np.float32)})
    with pytest.raises(ValueError, match=r"'__weight__' has shape \(8, 2\) for 8 examples"):
        list(loader_of(source, epochs=1))
    x = np.arange(8).astype(jnp.bfloat16)
    (batch,) = loader_of(eqxshard.data.ArraySource({"x": x}), shuffle=False, epochs=1)
    assert batch["x"].dtype == jnp.bfloat16 and rows(batch) == list(range(8))


@pytest.mark.parametrize(
    ("dtype", "low", "high"), [(np.int64, -(2**31), 2**31 - 1), (np.uint64, 0, 2**32 - 1)]
)
def test_integers_that_do_not_fit_32_bits_are_an_error(dtype, low, high):
    def first(value):
        x = np.array([value] + [0] * 7, dtype)
        source = eqxshard.data.ArraySource({"x": x, "none": np.zeros((8, 0), dtype)})
        with closing(iter(loader_of(source, shuffle=False))) as batches:
            return rows(next(batches))[0]

    beyond = [value for value in (low - 1, high + 1) if value >= np.iinfo(dtype).min]
    assert [first(low), first(high)] == [low, high]
    for value in beyond:
        with pytest.raises(ValueError, match=f"'x' has integers from .*{abs(value)}"):
            first(value)
    with jax.enable_x64(True):
        assert [first(value) for value in beyond] == beyond
