"""`ByteTokenizer`: text as its bytes."""

import numpy as np
from jaxtyping import Int
from numpy.typing import ArrayLike


class ByteTokenizer:
    """The bytes of a text in UTF-8: 256 tokens, and one that ends a document.

    !!! Example

        ```python
        tokenizer = eqxshard.data.text.ByteTokenizer()
        tokenizer.encode("né")  # [110, 195, 169]
        ```
    """

    vocab_size = 257
    eos_id = 256

    def encode(self, text: str) -> Int[np.ndarray, " n"]:
        """The tokens of a text, int32."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, ids: ArrayLike) -> str:
        """The text of some tokens, without those that end documents."""
        ids = np.asarray(ids)
        return ids[ids < 256].astype(np.uint8).tobytes().decode(errors="replace")
