"""`ByteTokenizer`: text as its bytes."""

import numpy as np
from jaxtyping import Int
from numpy.typing import ArrayLike


class ByteTokenizer:
    """A tokenizer with a token for each byte of UTF-8, and one that ends a document.

    !!! Example

        ```python
        tokenizer = eqxshard.data.text.ByteTokenizer()
        tokenizer.encode("né")  # [110, 195, 169]
        ```
    """

    vocab_size = 257
    eos_id = 256

    def encode(self, text: str) -> Int[np.ndarray, " n"]:
        """The tokens of a text, int32, one for each byte."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, ids: ArrayLike) -> str:
        """The text of some tokens, without those that end documents.

        Bytes that are not UTF-8 become replacement characters.
        """
        ids = np.asarray(ids)
        return ids[ids < 256].astype(np.uint8).tobytes().decode(errors="replace")
