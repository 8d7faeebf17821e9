import numpy as np

from eqxshard.data.text import ByteTokenizer

TEXT = "The cat sat\n\n on the naïve mat. 🐈\n"


def test_bytes_are_those_of_utf_8():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("né").tolist() == [110, 195, 169]
    assert tokenizer.encode(TEXT).dtype == np.int32
    assert tokenizer.decode([*tokenizer.encode(TEXT), tokenizer.eos_id]) == TEXT
    assert tokenizer.decode([195]) == "\N{REPLACEMENT CHARACTER}"
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (257, 256)
