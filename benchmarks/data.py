"""Batches per second that data loaders deliver, from memory and from files.

Batches have 256 images of 28 x 28 bytes, drawn in random order from 60,000 as in
Fashion-MNIST: small enough that the loader's own overhead shows. The baseline of a task is
bare NumPy, which leaves batches on the host. So do Grain and PyTorch; the batches of
eqxshard and of `jax.device_put` are on the devices. The tasks:

- from memory: the host's or, with `placement="device"`, the devices'; with nine more small
  arrays; with a step that uses each batch; and in two processes, each of which gathers half
  of a batch;
- with a transform that converts bytes to floats, normalises them and mirrors images with
  probability 1/2. It gets whole batches where the loader supports that, else one record;
- from a memory-mapped file, which this script writes first. If it fits in memory, it is
  read from the page cache; to measure the disk, make `--mapped-gigabytes` larger than the
  machine's memory;
- from ArrayRecord files, read in random order. The baseline is ArrayRecord's own call that
  reads many records at once;
- from pipelines of Grain's: of records, of records that are mirrored at random, and of
  sequences that are filtered and packed. The baseline is the same pipeline with
  `jax.device_put` by hand.

Workers are processes. Starting a loader and its workers is not measured.

    python benchmarks/data.py --devices 1 2 --output build/benchmarks
"""

import importlib
import importlib.util
import itertools
import random
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
from _loading import (
    BATCH_SIZE,
    Batches,
    Contestants,
    compare,
    prepare_for_workers,
    with_grain,
    with_torch,
)
from _peers._task import LOADER_STEPS, Task
from _processes import Contestant
from _side_by_side import Contest, Report, Turn, parser, take_turns

import eqxshard

IMAGES, SHAPE = 60_000, (28, 28)
#: Batches that are not measured: more than any loader makes ahead.
WARMUP_BATCHES = 32
FILES = 4
MEAN, STD = np.float32(127.5), np.float32(73.6)
RANDOM = np.random.default_rng(0)
#: For pipelines of Grain's, with eqxshard and without.
READ_OPTIONS = grain.ReadOptions(num_threads=16, prefetch_buffer_size=16)
#: The number of sequences, their greatest length, and the length and number of the rows of
#: a batch that they are packed into.
SEQUENCES, LONGEST, PACKED, PACKED_BATCH = 5000, 400, 512, 32


def augment(images: np.ndarray) -> np.ndarray:
    """The transform, applied to a whole batch."""
    mirrored = RANDOM.random(len(images)) < 0.5
    images = np.where(mirrored[:, None, None], images[:, :, ::-1], images)
    return (images - MEAN) / STD


def augment_one(image: np.ndarray, mirrored: bool) -> np.ndarray:
    return ((image[:, ::-1] if mirrored else image) - MEAN) / STD


def decode(record: bytes) -> np.ndarray:
    return np.frombuffer(record, np.uint8).reshape(SHAPE)


def shuffled(length: int) -> Iterator[np.ndarray]:
    """The row numbers of each batch."""
    for epoch in itertools.count():
        order = np.random.RandomState([0, epoch]).permutation(length)
        for start in range(0, length - BATCH_SIZE, BATCH_SIZE):
            yield order[start : start + BATCH_SIZE]


def with_numpy(images: np.ndarray) -> Batches:
    return (np.take(images, rows, axis=0) for rows in shuffled(len(images)))


def with_numpy_and_transform(images: np.ndarray) -> Batches:
    return (augment(batch) for batch in with_numpy(images))


def on_device(make: Callable[[], Batches]) -> Batches:
    return (jax.device_put(batch) for batch in make())


def with_steps(make: Callable[[], Batches]) -> Batches:
    """Batches, each used by a step that takes some 200 microseconds on a CPU."""
    weight = jnp.ones((128, 128))

    @jax.jit
    def step(x: jax.Array, batch: Any) -> jax.Array:
        images = jax.tree.leaves(batch)[0].reshape(BATCH_SIZE, -1)[:, :128]
        hidden = x + images.astype(jnp.float32).mean(axis=0)
        return jax.lax.fori_loop(0, 6, lambda _, x: jnp.tanh(x @ weight) * 0.01, hidden)

    x, in_flight = weight, deque()
    with closing(make()) as batches:
        for batch in batches:
            x = step(x, batch)
            in_flight.append(x)
            if len(in_flight) > 2:
                in_flight.popleft().block_until_ready()
            yield x


def with_eqxshard(
    source: Any, devices: int = 1, batch_size: int | None = BATCH_SIZE, **options: Any
) -> Batches:
    mesh = eqxshard.make_mesh(devices=jax.devices()[:devices])
    return iter(eqxshard.Loader(source, batch_size=batch_size, mesh=mesh, **options))


def with_device_put(dataset: grain.IterDataset) -> Batches:
    """Batches of a dataset of Grain's, put on a device by hand."""
    with closing(iter(dataset)) as batches:
        for batch in batches:
            yield jax.device_put(batch)


class TorchRecords:
    """A map-style PyTorch dataset: one example per index."""

    def __init__(self, images: np.ndarray, transform: Callable[[Any], Any]):
        self.images = images
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.transform(self.images[index])


def with_torch_in_bulk(dataset: Any) -> Batches:
    data = importlib.import_module("torch.utils.data")
    rows = data.BatchSampler(data.RandomSampler(dataset), BATCH_SIZE, drop_last=True)
    loader = data.DataLoader(dataset, sampler=rows, batch_size=None)
    while True:
        yield from loader


def augment_by_chance(image: np.ndarray) -> np.ndarray:
    # Python's generator, because PyTorch seeds it in each worker.
    return augment_one(image, random.random() < 0.5)


def stack(records: Sequence[bytes]) -> np.ndarray:
    return np.stack([decode(record) for record in records])


def stack_for_torch(records: Sequence[bytes]) -> Any:
    return importlib.import_module("torch").from_numpy(stack(records))


class Records:
    """Examples of ArrayRecord files, whose own call reads many at once."""

    def __init__(self, files: Any):
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def gather(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {"image": stack(self.files.__getitems__(indices.tolist()))}


def from_memory(images: np.ndarray, devices: Sequence[int], workers: int) -> Contestants:
    source = eqxshard.data.ArraySource({"image": images})
    baseline = partial(with_numpy, images)
    contestants: Contestants = {
        "NumPy": baseline,
        "NumPy, jax.device_put": partial(on_device, baseline),
    }
    for count in devices:
        contestants[f"eqxshard, {count} device(s)"] = partial(with_eqxshard, source, count)
        name = f"eqxshard, placement='device', {count} device(s)"
        contestants[name] = partial(with_eqxshard, source, count, placement="device")
    contestants["Grain, per record"] = partial(with_grain, list(images))
    if importlib.util.find_spec("torch"):
        tensor = importlib.import_module("torch").from_numpy(images)
        dataset = importlib.import_module("torch.utils.data").TensorDataset(tensor)
        contestants["PyTorch"] = partial(with_torch, dataset)
        contestants[f"PyTorch, {workers} worker(s)"] = partial(with_torch, dataset, workers)
        contestants["PyTorch, whole batches"] = partial(with_torch_in_bulk, dataset)
    return contestants


def with_transform(images: np.ndarray, workers: int) -> Contestants:
    source = eqxshard.data.ArraySource({"image": images})
    baseline = partial(with_numpy_and_transform, images)

    def transform(batch: Mapping[str, Any]) -> dict[str, Any]:
        return {"image": augment(batch["image"])}

    def prepare(records: grain.MapDataset) -> grain.MapDataset:
        return records.random_map(lambda image, rng: augment_one(image, rng.random() < 0.5))

    contestants: Contestants = {
        "NumPy": baseline,
        "NumPy, jax.device_put": partial(on_device, baseline),
    }
    for prefetch in (2, 0):
        contestants[f"eqxshard, prefetch={prefetch}"] = partial(
            with_eqxshard, source, transform=transform, prefetch=prefetch
        )
    contestants["Grain, per record"] = partial(with_grain, list(images), prepare)
    if importlib.util.find_spec("torch"):
        dataset = TorchRecords(images, augment_by_chance)
        contestants["PyTorch"] = partial(with_torch, dataset)
        contestants[f"PyTorch, {workers} worker(s)"] = partial(with_torch, dataset, workers)
    return contestants


def from_mapped_file(images: np.ndarray) -> Contestants:
    source = eqxshard.data.ArraySource({"image": images})
    baseline = partial(with_numpy, images)
    contestants: Contestants = {
        "NumPy": baseline,
        "NumPy, jax.device_put": partial(on_device, baseline),
        "eqxshard": partial(with_eqxshard, source),
        "Grain, per record": partial(with_grain, images),
    }
    if importlib.util.find_spec("torch"):
        # Copied, because tensors are writable and the mapped file is not.
        contestants["PyTorch"] = partial(with_torch, TorchRecords(images, np.copy))
    return contestants


def from_records(paths: Sequence[str], workers: int) -> Contestants:
    # Opened in each turn, so that contestants share no open files.
    def open_files() -> Any:
        return grain.sources.ArrayRecordDataSource(paths)

    def baseline() -> Batches:
        files = open_files()
        return (stack(files.__getitems__(rows.tolist())) for rows in shuffled(len(files)))

    def with_ours(**options: Any) -> Batches:
        return with_eqxshard(examples(open_files()), **options)

    def with_grains(**options: Any) -> Batches:
        return with_grain(open_files(), lambda records: records.map(decode), **options)

    def with_torchs(**options: Any) -> Batches:
        return with_torch(open_files(), collate_fn=stack_for_torch, **options)

    contestants: Contestants = {
        "ArrayRecord and NumPy": baseline,
        "eqxshard, in bulk": lambda: with_eqxshard(Records(open_files())),
        "eqxshard, threads": with_ours,
        f"eqxshard, {workers} worker(s)": partial(with_ours, workers=workers),
        "Grain, threads": with_grains,
        f"Grain, {workers} worker(s)": partial(with_grains, workers=workers),
    }
    if importlib.util.find_spec("torch"):
        contestants["PyTorch"] = with_torchs
        contestants[f"PyTorch, {workers} worker(s)"] = partial(with_torchs, workers=workers)
    return contestants


def in_processes(counts: Sequence[int], rounds: int) -> Contest:
    """Batches from memory, of which each of several processes gathers its own rows."""
    with ExitStack() as stack:
        turns: dict[str, Turn] = {}
        for count in counts:
            for name, variant in {"NumPy, by hand": "hand", "eqxshard": ""}.items():
                task = Task("", "", batch_size=BATCH_SIZE, variant=variant)
                process = stack.enter_context(
                    Contestant("loader_steps", task, processes=count)
                )
                process.ready()
                turns[f"{name}, {count} process(es)"] = partial(steps_per_second, process)
        return Contest("from memory, in processes", "batches/s", take_turns(turns, rounds))


def steps_per_second(process: Contestant) -> float:
    return LOADER_STEPS / process.ask("train")["seconds"]


def from_ten_arrays(images: np.ndarray) -> Contestants:
    arrays = {"image": images} | {
        f"x{i}": RANDOM.integers(0, 256, (IMAGES, 16), np.uint8) for i in range(9)
    }

    def baseline() -> Batches:
        for rows in shuffled(IMAGES):
            yield {name: np.take(array, rows, axis=0) for name, array in arrays.items()}

    source = eqxshard.data.ArraySource(arrays)
    contestants: Contestants = {
        "NumPy": baseline,
        "NumPy, jax.device_put": partial(on_device, baseline),
    }
    contestants["eqxshard"] = partial(with_eqxshard, source)
    return contestants


def from_memory_with_a_step(images: np.ndarray) -> Contestants:
    by_hand = partial(on_device, partial(with_numpy, images))
    source = eqxshard.data.ArraySource({"image": images})
    return {
        "NumPy, jax.device_put": partial(with_steps, by_hand),
        "eqxshard": partial(with_steps, partial(with_eqxshard, source)),
    }


def examples(records: Any) -> grain.MapDataset:
    """An endless dataset of Grain's; records of bytes are decoded."""

    def example(record: Any) -> dict[str, np.ndarray]:
        return {"image": decode(record) if isinstance(record, bytes) else record}

    return grain.MapDataset.source(records).seed(0).shuffle().map(example).repeat()


def mirrored(records: Any) -> grain.MapDataset:
    def mirror(example: dict[str, Any], draw: np.random.Generator) -> dict[str, Any]:
        return {"image": augment_one(example["image"], draw.random() < 0.5)}

    return examples(records).random_map(mirror)


def packed(sequences: Sequence[np.ndarray]) -> grain.IterDataset:
    """Batches of sequences that are not very short, several in each row."""
    records = grain.MapDataset.source(sequences).seed(0).shuffle().repeat()
    long = records.to_iter_dataset(READ_OPTIONS).filter(lambda tokens: len(tokens) > 20)
    rows = grain.experimental.FirstFitPackIterDataset(
        long.map(lambda tokens: {"tokens": tokens}),
        length_struct={"tokens": PACKED},
        num_packing_bins=16,
    )
    return rows.batch(PACKED_BATCH)


def from_examples(make: Callable[[], grain.MapDataset]) -> Contestants:
    """A pipeline of examples, read by the same number of threads in both turns."""

    def by_hand() -> Batches:
        return with_device_put(make().batch(BATCH_SIZE).to_iter_dataset(READ_OPTIONS))

    def ours() -> Batches:
        return with_eqxshard(make(), read_options=READ_OPTIONS)

    return {"Grain, jax.device_put": by_hand, "eqxshard": ours}


def from_batches(make: Callable[[], grain.IterDataset]) -> Contestants:
    """A pipeline of batches."""
    return {
        "Grain, jax.device_put": lambda: with_device_put(make()),
        "eqxshard": lambda: with_eqxshard(make(), batch_size=None),
    }


def make_sequences() -> list[np.ndarray]:
    lengths = RANDOM.integers(10, LONGEST, SEQUENCES)
    return [RANDOM.integers(0, 256, length, np.int32) for length in lengths]


def write_array(path: Path, gigabytes: float) -> None:
    rows = max(int(gigabytes * 2**30) // 784, BATCH_SIZE)
    array = np.lib.format.open_memmap(path, "w+", np.uint8, (rows, *SHAPE))
    images = RANDOM.integers(0, 256, (IMAGES, *SHAPE), np.uint8)
    for start in range(0, rows, IMAGES):
        array[start : start + IMAGES] = images[: rows - start]
    array.flush()  # so that no turn waits for these writes


def write_records(folder: Path, images: np.ndarray) -> list[str]:
    writer = importlib.import_module("array_record.python.array_record_module")
    paths = []
    for number, part in enumerate(np.array_split(images, FILES)):
        path = str(folder / f"images-{number:05}-of-{FILES:05}.arrayrecord")
        # Groups of one, as Grain requires for random access.
        file = writer.ArrayRecordWriter(path, "group_size:1")
        for image in part:
            file.write(image.tobytes())
        file.close()
        paths.append(path)
    return paths


def main() -> None:
    options = parser(__doc__, rounds=7)
    options.add_argument("--devices", type=int, nargs="+", default=[1], metavar="N")
    options.add_argument("--seconds", type=float, default=0.5, help="length of each turn")
    options.add_argument(
        "--mapped-gigabytes", type=float, default=2.0, help="size of the memory-mapped file"
    )
    options.add_argument(
        "--workers", type=int, default=2, help="worker processes of a loader"
    )
    args = options.parse_args()
    jax.config.update("jax_num_cpu_devices", max(args.devices))
    prepare_for_workers()
    images = RANDOM.integers(0, 256, (IMAGES, *SHAPE), np.uint8)
    contests = []

    def add(title: str, contestants: Contestants) -> None:
        turns = {"seconds": args.seconds, "warmup": WARMUP_BATCHES, "rounds": args.rounds}
        contests.append(compare(title, contestants, **turns))

    add("from memory", from_memory(images, args.devices, args.workers))
    add("from memory, ten arrays", from_ten_arrays(images))
    add("from memory, with a step", from_memory_with_a_step(images))
    contests.append(in_processes((1, 2), args.rounds))
    add("from memory, with a transform", with_transform(images, args.workers))
    records = list(images)
    add("Grain's records", from_examples(lambda: examples(records)))
    add("Grain's records, mirrored", from_examples(lambda: mirrored(records)))
    sequences = make_sequences()
    add("Grain's packed sequences", from_batches(lambda: packed(sequences)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "images.npy")
        write_array(path, args.mapped_gigabytes)
        # As a plain array: np.memmap takes longer to index.
        mapped = np.asarray(np.load(path, mmap_mode="r"))
        title = f"from a memory-mapped file of {args.mapped_gigabytes:g} GB"
        add(title, from_mapped_file(mapped))
        del mapped
        path.unlink()
        if importlib.util.find_spec("array_record"):
            paths = write_records(Path(folder), images)
            add("from ArrayRecord files", from_records(paths, args.workers))
            files = partial(grain.sources.ArrayRecordDataSource, paths)
            title = "Grain's records from ArrayRecord files"
            add(title, from_examples(lambda: examples(files())))
        else:
            print("array_record is not installed; ArrayRecord files are left out.")
    setting = {"images": IMAGES, "batch_size": BATCH_SIZE, "rounds": args.rounds}
    Report("data", contests, setting).show_and_write(args.output)


if __name__ == "__main__":
    main()
