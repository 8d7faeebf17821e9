"""PNG files, without a package for images."""

import struct
import zlib

import numpy as np

#: By the number of channels, what PNG calls the colour type.
_COLOUR_TYPES = {1: 0, 3: 2, 4: 6}


def encode_png(pixels: np.ndarray) -> bytes:
    """The bytes of a PNG file.

    **Arguments:**

    - `pixels`: bytes, rows by columns by 1, 3 or 4 channels.
    """
    rows, columns, channels = pixels.shape
    head = struct.pack(">IIBBBBB", columns, rows, 8, _COLOUR_TYPES[channels], 0, 0, 0)
    # Before each row is the number of its filter: 0, for none.
    lines = np.pad(pixels.reshape(rows, columns * channels), ((0, 0), (1, 0)))
    chunks = {b"IHDR": head, b"IDAT": zlib.compress(lines.tobytes()), b"IEND": b""}
    parts = [b"\x89PNG\r\n\x1a\n"]
    for name, data in chunks.items():
        check = struct.pack(">I", zlib.crc32(name + data))
        parts += [struct.pack(">I", len(data)), name, data, check]
    return b"".join(parts)
