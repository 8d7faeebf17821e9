"""Stand-ins of the datasets that can be downloaded; recipes use them in test_planned.py."""

import numpy as np

from eqxshard.data import fashion_mnist, synthetic_fashion, text
from eqxshard.data._planning import add_note, is_planning, planning


def test_only_what_runs_inside_is_planned():
    assert not is_planning()
    with planning() as notes:
        assert is_planning()
        add_note("a note")
        with planning() as others:
            add_note("another")
    assert (notes, others) == (["a note"], ["another"]) and not is_planning()


def test_stand_ins_are_like_the_data(tmp_path):
    with planning():
        generated, real = (
            synthetic_fashion("test"),
            fashion_mnist("test", data_dir=tmp_path),
        )
        corpus = text.shakespeare(tmp_path)
    drawn = synthetic_fashion("test", size=20)
    for source in (generated, real):
        assert len(source) == 10_000
        for name, array in source.arrays.items():
            assert array.shape[1:] == drawn.arrays[name].shape[1:]
            assert array.dtype == drawn.arrays[name].dtype
    assert not np.any(generated.arrays["image"]) and np.any(drawn.arrays["image"])
    # As `test_shakespeare.py` finds in the text itself.
    assert (len(corpus.train), len(corpus.valid)) == (1_003_854, 111_540)
    assert corpus.vocab_size == 65 and corpus.name == "shakespeare"
