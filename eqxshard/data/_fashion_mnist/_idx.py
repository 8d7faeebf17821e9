"""The IDX format of the MNIST family: a small header, then one array of bytes.

The header is four bytes (two zeros, the element type, the number of dimensions) and
one big-endian 32-bit size for each dimension; the elements follow, last axis fastest.
"""

import gzip
import io
import math
import struct
import zlib

import numpy as np
from jaxtyping import UInt8


def gunzip(data: bytes, most: int = 2**30) -> bytes:
    """Decompress a gzip file; raise `ValueError` if it is damaged, or has more bytes."""
    if not data.startswith(b"\x1f\x8b"):
        raise ValueError("it is empty" if not data else "it is not a gzip file")
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            found = file.read(most + 1)
    except EOFError:
        raise ValueError(f"its gzip data end after {len(data):,} bytes") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"its gzip data are corrupt ({error})") from None
    if len(found) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return found


def parse_idx(data: bytes, shape: tuple[int, ...]) -> UInt8[np.ndarray, "..."]:
    """Read an array of unsigned bytes, as a read-only view; raise if the shape differs."""
    magic = bytes([0, 0, 0x08, len(shape)])  # 0x08: unsigned bytes
    if not data.startswith(magic):
        raise ValueError(f"its IDX magic number is 0x{data[:4].hex()}, not 0x{magic.hex()}")
    header = len(magic) + 4 * len(shape)
    if len(data) < header:
        raise ValueError(f"its IDX header ends after {len(data)} of {header} bytes")
    sizes = struct.unpack_from(f">{len(shape)}I", data, len(magic))
    if sizes != shape:
        raise ValueError(f"its IDX header gives the shape {sizes}, not {shape}")
    array = np.frombuffer(data, np.uint8, offset=header)
    expected = math.prod(shape)
    if array.size != expected:
        raise ValueError(
            f"it holds {array.size:,} bytes of data, but its IDX header promises "
            f"{expected:,}"
        )
    return array.reshape(shape)
