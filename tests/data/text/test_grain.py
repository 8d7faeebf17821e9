"""Whole documents packed by Grain, as the page Text shows."""

import itertools
import json

import grain
import numpy as np
from loader_helpers import MESHES, mesh_of, take

import eqxshard

SEQ_LEN, ROWS = 16, 8
#: Tokens whose numbers say which document they are of, and where in it.
DOCUMENTS = [100 * i + np.arange(n, dtype=np.int32) for i, n in enumerate([5, 2, 17, 9, 3])]


def to_example(document):
    return {"tokens": document[:-1], "targets": document[1:]}


def rename(example):
    return {
        "tokens": example["tokens"],
        "targets": example["targets"],
        "segments": example["tokens_segment_ids"],
        "positions": example["tokens_positions"],
        "__weight__": np.float32(np.sum(example["targets"] >= 0)),
    }


def packed_loader():
    dataset = grain.MapDataset.source(DOCUMENTS).seed(0).shuffle().repeat()
    packed = grain.experimental.FirstFitPackIterDataset(
        dataset.map(to_example).to_iter_dataset(),
        length_struct={"tokens": SEQ_LEN, "targets": SEQ_LEN},
        padding_struct={"tokens": 0, "targets": -1},
        num_packing_bins=3,
    )
    batches = packed.map(rename).batch(ROWS)
    return eqxshard.Loader(batches, mesh=mesh_of(**MESHES[3]))


def segments_of(batches):
    """The tokens of each segment of each row; checks all that goes with them."""
    for batch in batches:
        arrays = {name: np.asarray(array) for name, array in batch.items()}
        for row in range(ROWS):
            part = {name: array[row] for name, array in arrays.items()}
            real = part["segments"] > 0
            np.testing.assert_array_equal(part["targets"] >= 0, real)
            assert part["__weight__"] == real.sum()
            for segment in np.unique(part["segments"][real]):
                here = part["segments"] == segment
                tokens = part["tokens"][here].tolist()
                assert part["positions"][here].tolist() == list(range(len(tokens)))
                assert part["targets"][here].tolist() == [*tokens[1:], tokens[-1] + 1]
                yield tokens


def test_every_document_is_whole_and_as_often_as_any_other():
    found = list(segments_of(take(packed_loader(), 4)))
    expected = [document[:-1].tolist() for document in DOCUMENTS]
    counts = [found.count(tokens) for tokens in expected]
    assert sum(counts) == len(found) > 4 * ROWS
    # Grain shuffles each epoch, and the last batch ends within one.
    assert max(counts) - min(counts) <= 3


def test_it_goes_on_where_it_was():
    loader = packed_loader()
    iterator = iter(loader)
    next(iterator)
    # As JSON, since a checkpoint holds it.
    state = json.loads(json.dumps(loader.state()))
    expected = list(itertools.islice(iterator, 3))
    iterator.close()
    again = packed_loader()
    again.restore(state)
    for batch, other in zip(expected, take(again, 3), strict=True):
        for name, array in batch.items():
            np.testing.assert_array_equal(array, other[name])
