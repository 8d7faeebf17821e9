import numpy as np
import pytest

from eqxshard.data.text import TokenArray, TokenRange, Tokens


def test_tokens_in_memory():
    tokens = TokenArray(np.array([3, 1, 2], np.uint16), vocab_size=10)
    assert isinstance(tokens, Tokens)
    assert len(tokens) == 3 and tokens.vocab_size == 10 and tokens.ends().tolist() == [3]
    found = tokens.take(np.array([[2, 0], [1, 1]]))
    assert found.dtype == np.int32 and found.tolist() == [[2, 3], [1, 1]]
    assert TokenArray([3, 1]).vocab_size == 4


@pytest.mark.parametrize(
    "tokens, options, says",
    [
        ([0.5], {}, r"float64 of shape \(1,\); give one row of integers"),
        ([[1, 2]], {}, r"int64 of shape \(1, 2\)"),
        ([1, 7], {"vocab_size": 7}, "a token 7, and the vocabulary has 7; give .* to 6"),
        ([1, -1], {}, "a token -1"),
        ([1, 2, 3], {"ends": []}, "ends must increase up to"),
    ],
)
def test_what_are_not_tokens_is_refused(tokens, options, says):
    with pytest.raises(ValueError, match=says):
        TokenArray(tokens, **options)


def test_a_range_cuts_documents():
    tokens = TokenArray(np.arange(10), ends=[2, 5, 6, 10])
    part = TokenRange(tokens, 1, 8)
    assert isinstance(part, Tokens)
    assert len(part) == 7 and part.vocab_size == 10
    assert part.take(np.arange(7)).tolist() == list(range(1, 8))
    assert part.ends().tolist() == [1, 4, 5, 7]
    assert TokenRange(tokens, 5, 6).ends().tolist() == [1]
    assert TokenRange(tokens, 5, 5).ends().tolist() == []
    with pytest.raises(ValueError, match="tokens 5 to 11 are not within 10"):
        TokenRange(tokens, 5, 11)
