import itertools
import json
import math
import os
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import eqxshard

MESHES = (
    {"count": 1},
    {"count": 2},
    {"count": 4, "fsdp": 2},
    {"count": 8},
    {"count": 8, "fsdp": 4},
    {"count": 8, "tensor": 2, "fsdp": 2},
)


def mesh_of(*, count, **axes):
    return eqxshard.make_mesh(devices=jax.devices()[:count], **axes)


def numbers(n):
    """A source whose example i is the number i."""
    return eqxshard.data.ArraySource({"x": np.arange(n, dtype=np.int32)})


def loader_of(source, *, mesh=MESHES[0], batch_size=8, **options):
    return eqxshard.Loader(source, batch_size=batch_size, mesh=mesh_of(**mesh), **options)


def read(loader, count=None):
    """The next batches, as lists of what has weight, on the host."""
    with closing(iter(loader)) as batches:
        return [rows(batch) for batch in itertools.islice(batches, count)]


def rows(batch):
    x = np.asarray(batch["x"])
    if "weight" in batch:
        weight = np.asarray(batch["weight"])
        assert weight.dtype == np.float32
        assert set(weight.tolist()) <= {0, 1}
        x = x[weight == 1]
    return x.tolist()


def flat(lists):
    return list(itertools.chain.from_iterable(lists))


def grain_threads():
    return [t for t in threading.enumerate() if t.name.startswith("grain")]


def assert_threads_end():
    deadline = time.monotonic() + 10
    while grain_threads():
        assert time.monotonic() < deadline, grain_threads()
        time.sleep(0.01)


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
    step = data.draw(st.integers(0, len(batches) + 1))
    loader.seek(step)
    assert read(loader) == batches[step:]


def test_the_order_is_the_same_on_every_mesh():
    orders = [
        read(loader_of(numbers(100), mesh=mesh, batch_size=16, seed=3, epochs=2))
        for mesh in MESHES
    ]
    assert all(order == orders[0] for order in orders)


def test_the_order_never_changes():
    # As numpy.random.RandomState([0, epoch]).permutation(10) gave it, once and for all.
    first, second = read(loader_of(numbers(10), batch_size=10, epochs=2))
    assert first == [3, 7, 6, 4, 1, 0, 2, 8, 5, 9]
    assert second == [9, 4, 0, 8, 1, 5, 3, 2, 6, 7]


def test_epochs_and_seeds_have_orders_of_their_own():
    first, second = read(loader_of(numbers(64), batch_size=64, epochs=2))
    other = read(loader_of(numbers(64), batch_size=64, seed=1), 1)[0]
    assert len({tuple(first), tuple(second), tuple(other)}) == 3


def test_without_shuffle_every_epoch_is_in_the_order_of_the_source():
    loader = loader_of(numbers(20), shuffle=False, epochs=2)
    assert flat(read(loader)) == [*range(20), *range(20)]


def test_without_epochs_there_is_no_end():
    loader = loader_of(numbers(8))
    loader.seek(10**9)
    assert [sorted(batch) for batch in read(loader, 30)] == [list(range(8))] * 30


# Batches


def test_all_batches_have_one_structure_and_weights_that_add_up():
    with closing(iter(loader_of(numbers(20), epochs=1))) as batches:
        parts = list(batches)
    assert [sorted(part) for part in parts] == [["weight", "x"]] * 3
    assert {part["x"].shape for part in parts} == {(8,)}
    assert [float(part["weight"].sum()) for part in parts] == [8, 8, 4]
    avals = {(part["weight"].aval, part["weight"].sharding) for part in parts}
    assert len(avals) == 1


def test_full_batches_share_their_weights_until_somebody_donates_them():
    with closing(iter(loader_of(numbers(64)))) as batches:
        first, second = next(batches), next(batches)
        assert first["weight"] is second["weight"]
        first["weight"].delete()
        assert float(next(batches)["weight"].sum()) == 8


def test_weights_of_the_source_are_kept_and_padding_has_none():
    source = eqxshard.data.ArraySource(
        {"x": np.arange(10, dtype=np.int32), "weight": np.linspace(1, 2, 10)}
    )
    loader = loader_of(source, shuffle=False, epochs=1)
    first, last = (np.asarray(batch["weight"]) for batch in loader)
    assert first.dtype == last.dtype == np.float32
    np.testing.assert_allclose(first, np.linspace(1, 2, 10)[:8], rtol=1e-6)
    np.testing.assert_allclose(last, [17 / 9, 2, 0, 0, 0, 0, 0, 0], rtol=1e-6)


def test_padding_has_no_weight_even_where_the_source_has_nan():
    source = eqxshard.data.ArraySource({"weight": np.array([np.nan] + [1.0] * 8)})
    last = list(loader_of(source, shuffle=False, epochs=1))[-1]
    assert np.asarray(last["weight"]).tolist() == [1, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("remainder", ["drop", "error"])
def test_without_padding_there_are_no_weights(remainder):
    (batch,) = loader_of(numbers(8), remainder=remainder, epochs=1)
    assert list(batch) == ["x"]


@pytest.mark.parametrize("mesh", MESHES)
def test_each_device_gets_its_own_rows_only(mesh):
    image = np.arange(32 * 6, dtype=np.float32).reshape(32, 2, 3)
    source = eqxshard.data.ArraySource({"x": image})
    loader = loader_of(source, mesh=mesh, batch_size=16, shuffle=False)
    with closing(iter(loader)) as batches:
        batch = next(batches)
    parts = math.prod(loader_mesh_sizes(mesh))
    for array in batch.values():
        assert array.committed
        assert array.sharding == eqxshard.batch_sharding(mesh_of(**mesh))
        assert {shard.data.shape[0] for shard in array.addressable_shards} == {16 // parts}
    for shard in batch["x"].addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), image[:16][shard.index])


def loader_mesh_sizes(mesh):
    return [mesh_of(**mesh).shape[axis] for axis in ("data", "fsdp")]


def test_the_transform_gets_whole_batches():
    def transform(batch):
        assert batch["x"].shape == (8,)
        return {"x": batch["x"] * 2, "square": batch["x"] ** 2}

    loader = loader_of(numbers(12), transform=transform, shuffle=False, epochs=1)
    first, last = loader
    assert sorted(last) == ["square", "weight", "x"]
    assert np.asarray(first["square"]).tolist() == [i**2 for i in range(8)]
    assert rows(last) == [16, 18, 20, 22]


# The position


@settings(deadline=None, max_examples=30)
@given(
    n=st.integers(1, 40),
    read_first=st.integers(0, 12),
    prefetch=st.integers(0, 3),
    mesh=st.sampled_from(MESHES),
)
def test_a_restored_loader_goes_on_with_the_very_next_batch(n, read_first, prefetch, mesh):
    whole = read(loader_of(numbers(n)), 16)
    stopped = loader_of(numbers(n), prefetch=prefetch)
    read(stopped, read_first)
    state = json.loads(json.dumps(stopped.state()))
    assert state["step"] == read_first
    resumed = loader_of(numbers(n), mesh=mesh, epochs=100)
    resumed.restore(state)
    assert read(resumed, 16 - read_first) == whole[read_first:]


def test_the_position_counts_what_the_caller_had_not_what_was_prefetched():
    loader = loader_of(numbers(64), prefetch=4)
    with closing(iter(loader)) as batches:
        assert loader.state()["step"] == 0
        next(batches)
        assert loader.state()["step"] == 1
    assert loader.state()["step"] == 1


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"batch_size": 16}, "batch_size was 8 and is 16"),
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"shuffle": False}, "shuffle was True and is False"),
        ({"remainder": "drop"}, "remainder was 'pad' and is 'drop'"),
        (
            {"seed": 1, "shuffle": False},
            "seed was 0 and is 1, shuffle was True and is False",
        ),
    ],
)
def test_the_state_of_another_run_is_refused(changed, says):
    loader = loader_of(numbers(64), **changed)
    with pytest.raises(ValueError, match=says):
        loader.restore(loader_of(numbers(64)).state())
    assert loader.state()["step"] == 0


def test_the_state_of_another_source_or_of_something_else_is_refused():
    with pytest.raises(ValueError, match="length was 63 and is 64"):
        loader_of(numbers(64)).restore(loader_of(numbers(63)).state())
    with pytest.raises(ValueError, match="not the state of a loader"):
        loader_of(numbers(64)).restore({"next_index": 3})


@pytest.mark.parametrize(
    "state",
    [None, [], {"step": 1, "fingerprint": None}, {"step": None, "fingerprint": {}}],
)
def test_what_is_not_a_state_is_refused(state, unannotated):
    with pytest.raises(ValueError, match="is not the state of a loader; give"):
        loader_of(numbers(64)).restore(state)


def test_numbers_of_numpy_are_in_the_state_as_json_has_them(unannotated):
    options: dict[str, Any] = {"batch_size": np.int64(8), "seed": np.int64(3)}
    loader = loader_of(numbers(64), **options)
    state = json.loads(json.dumps(loader.state()))
    other = loader_of(numbers(64), seed=3)
    other.restore(state)
    assert read(other, 1) == read(loader, 1)


def test_iterators_do_not_disturb_each_other_and_the_last_to_advance_has_the_position():
    loader = loader_of(numbers(64), shuffle=False)
    with closing(iter(loader)) as a, closing(iter(loader)) as b:
        assert rows(next(a))[0] == 0
        assert rows(next(a))[0] == 8
        assert rows(next(b))[0] == 0
        assert loader.state()["step"] == 1
        assert rows(next(a))[0] == 16
        assert loader.state()["step"] == 3
        with closing(iter(loader)) as c:
            loader.seek(0)
            assert rows(next(c))[0] == 24
        assert rows(next(b))[0] == 8


def test_an_ended_loader_gives_no_more_until_it_is_sent_back():
    loader = loader_of(numbers(16), epochs=1)
    assert len(read(loader)) == 2
    assert read(loader) == []
    loader.seek(1)
    assert len(read(loader)) == 1


# Threads


def test_a_loader_has_no_thread_before_its_first_batch_and_after_its_last():
    # Those of earlier tests may take a moment.
    assert_threads_end()
    loader = loader_of(numbers(64), epochs=1)
    batches = iter(loader)
    assert not grain_threads()
    next(batches)
    assert grain_threads()
    list(batches)
    assert_threads_end()


@pytest.mark.parametrize("end", ["close", "drop", "raise"])
def test_the_thread_ends_with_its_iterator(end):
    batches = iter(loader_of(numbers(64)))
    next(batches)
    assert grain_threads()
    if end == "close":
        batches.close()
    elif end == "raise":
        with pytest.raises(RuntimeError):
            batches.throw(RuntimeError())
    del batches
    assert_threads_end()


def test_without_prefetch_there_is_no_thread_and_nothing_is_gathered_early():
    gathered = []

    def transform(batch):
        gathered.append(threading.current_thread())
        return batch

    with closing(iter(loader_of(numbers(64), transform=transform, prefetch=0))) as batches:
        for count in range(1, 6):
            next(batches)
            assert gathered == [threading.main_thread()] * count


@pytest.mark.parametrize(
    ("row_bytes", "prefetch", "calls"),
    [
        # Batches of 2 MiB, one in each call.
        (2**18, 1, 1 + 1),
        (2**18, 2, 1 + 2),
        (2**18, 5, 1 + 5),
        # Batches of 128 KiB: after the first, 16 in each call.
        (2**14, 2, 1 + 2),
        (2**14, 80, 1 + 5),
    ],
)
def test_so_much_is_gathered_while_the_caller_computes(row_bytes, prefetch, calls):
    gathered = threading.Semaphore(0)

    class Large:
        def __len__(self):
            return 512

        def gather(self, indices):
            gathered.release()
            return {"x": np.zeros((len(indices), row_bytes), np.uint8)}

    with closing(iter(loader_of(Large(), prefetch=prefetch))) as batches:
        next(batches)
        for _ in range(calls):
            assert gathered.acquire(timeout=10)
        assert not gathered.acquire(timeout=0.05)


PROGRAM = """
import os, signal, threading, time
import jax, numpy as np
import eqxshard

class Slow:
    def __len__(self):
        return 1000

    def gather(self, indices):
        time.sleep(0.2)
        return {"x": indices.astype(np.int32)}

loader = eqxshard.Loader(Slow(), batch_size=8, mesh=eqxshard.make_mesh())
assert threading.enumerate() == [threading.main_thread()]
"""


def run(program):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + program],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    return done.returncode, done.stdout, done.stderr


def test_a_program_ends_though_its_iterators_are_left_open():
    program = """
batches = iter(loader)
next(batches)
for batch in loader:
    break
print("end")
"""
    assert run(program) == (0, "end\n", "")


def test_an_interrupt_ends_the_wait_for_a_batch():
    program = """
def interrupt():
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt).start()
try:
    for batch in loader:
        pass
except KeyboardInterrupt:
    print("interrupted")
"""
    assert run(program) == (0, "interrupted\n", "")


# Errors


def test_what_the_source_raises_reaches_the_caller():
    class Damaged:
        def __len__(self):
            return 512

        def gather(self, indices):
            if 500 in indices:
                raise KeyError("example 500")
            return {"x": indices}

    with pytest.raises(KeyError, match="example 500"):
        list(loader_of(Damaged(), shuffle=False))
    assert_threads_end()


def test_another_number_of_rows_than_asked_for_is_an_error():
    class Short:
        def __len__(self):
            return 100

        def gather(self, indices):
            return {"x": indices, "label": indices[1:]}

    with pytest.raises(ValueError, match=r"gather returned 'label' of shape \(7,\) for 8"):
        list(loader_of(Short()))
    with pytest.raises(ValueError, match=r"transform returned 'y' of shape \(2, 4\) for 8"):
        list(loader_of(numbers(8), transform=lambda b: {"y": b["x"].reshape(2, 4)}))
    with pytest.raises(ValueError, match=r"transform returned 'y' of shape \(\) for 8"):
        list(loader_of(numbers(8), transform=lambda b: {"y": b["x"].sum()}))


def test_a_transform_that_returns_nothing_is_an_error(unannotated):
    with pytest.raises(TypeError, match="transform returned a NoneType; return a dict"):
        list(loader_of(numbers(8), transform=lambda batch: None))


def test_a_weight_must_be_a_number_for_each_example():
    source = eqxshard.data.ArraySource({"weight": np.ones((8, 2), np.float32)})
    with pytest.raises(ValueError, match=r"'weight' has shape \(8, 2\) for 8 examples"):
        list(loader_of(source))


def test_entries_that_jax_cannot_hold_are_named():
    source = eqxshard.data.ArraySource({"file": np.array(["a.png"] * 8)})
    with pytest.raises(TypeError, match="'file' is of type <U5"):
        list(loader_of(source))


def test_records_are_named_and_bfloat16_is_none():
    records = np.zeros(8, [("a", np.int32), ("b", np.float32)])
    with pytest.raises(TypeError, match="'record' is of type"):
        list(loader_of(eqxshard.data.ArraySource({"record": records})))
    x = np.arange(8).astype(jnp.bfloat16)
    (batch,) = loader_of(eqxshard.data.ArraySource({"x": x}), shuffle=False, epochs=1)
    assert batch["x"].dtype == jnp.bfloat16
    assert rows(batch) == list(range(8))


@pytest.mark.parametrize(
    ("dtype", "low", "high"), [(np.int64, -(2**31), 2**31 - 1), (np.uint64, 0, 2**32 - 1)]
)
def test_integers_that_32_bits_cannot_hold_are_named(dtype, low, high):
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


@pytest.mark.parametrize("source", [[1, 2, 3], {"x": np.zeros(3)}, iter(range(3)), None])
def test_what_is_not_a_source_is_refused(source, unannotated):
    with pytest.raises(TypeError, match=f"a {type(source).__name__} is not a source; give"):
        loader_of(source)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch_size": 0}, "batch size 0 is not a size"),
        ({"batch_size": -8}, "batch size -8 is not a size"),
        (
            {"batch_size": 12, "mesh": MESHES[3]},
            "batch size 12 does not divide over data=8",
        ),
        ({"epochs": 0}, "epochs=0 is not a number of epochs"),
        ({"prefetch": -1}, "prefetch=-1 is not a number of batches"),
        ({"seed": -1}, "seed=-1 is not a seed"),
        ({"seed": 2**32}, "seed=4294967296 is not a seed"),
        ({"remainder": "error"}, "batches of 8 leave 2 of 10 examples over"),
        ({"remainder": "drop", "batch_size": 16}, "10 examples, less than one batch of 16"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        loader_of(numbers(10), **options)


@pytest.mark.parametrize("options", [{"batch_size": 16.0}, {"seed": 1.5}])
def test_integers_are_not_floats(options, unannotated):
    with pytest.raises(TypeError, match="'float' object cannot be interpreted as an int"):
        loader_of(numbers(10), **options)


def test_a_remainder_that_is_not_known_is_refused(unannotated):
    with pytest.raises(ValueError, match="remainder='pda' is not known; use 'pad'"):
        loader_of(numbers(10), remainder="pda")


def test_an_empty_source_is_refused():
    with pytest.raises(ValueError, match="the source is empty"):
        loader_of(numbers(0))


def test_there_is_no_step_before_the_first():
    with pytest.raises(ValueError, match="step -1 is before the start"):
        loader_of(numbers(10)).seek(-1)


# Worker processes


class Slow:
    """A record source that is sent to other processes."""

    def __len__(self):
        return 50

    def __getitem__(self, index):
        return {"x": np.int32(index)}


def with_process(batch):
    return {**batch, "process": np.full(len(batch["x"]), os.getpid(), np.int32)}


@pytest.mark.parametrize("remainder", ["pad", "drop"])
def test_workers_change_nothing_but_where_batches_are_made(remainder):
    options = {"remainder": remainder, "seed": 3, "epochs": 2}
    source = eqxshard.data.RecordSource(Slow())
    here = read(loader_of(source, **options))
    loader = loader_of(source, **options, workers=2, transform=with_process)
    there, processes = [], set()
    for batch in loader:
        there.append(rows(batch))
        processes |= set(np.asarray(batch["process"]).tolist())
    assert there == here
    # The first batch is made here, so that nobody waits for a process to start.
    assert len(processes) == 3 and os.getpid() in processes
    # From the middle of an epoch: the position is what was had, not what was prefetched.
    other = loader_of(source, **options, workers=2)
    other.seek(2)
    assert read(other, 3) == here[2:5]
    again = loader_of(source, **options)
    again.restore(other.state())
    assert read(again) == here[5:]


def test_a_negative_number_of_workers_is_refused():
    with pytest.raises(ValueError, match="workers=-1 is not a number of processes; use 0"):
        loader_of(numbers(16), workers=-1)
