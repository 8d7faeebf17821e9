import gzip
import struct

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from eqxshard.data._fashion_mnist._idx import gunzip, parse_idx

SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
ARRAYS = hnp.arrays(np.uint8, SHAPES)


def encode(array: np.ndarray) -> bytes:
    magic = bytes([0, 0, 0x08, array.ndim])
    sizes = struct.pack(f">{array.ndim}I", *array.shape)
    return magic + sizes + array.tobytes()


EXAMPLE = encode(np.arange(24, dtype=np.uint8).reshape(2, 3, 4))


@given(ARRAYS)
def test_round_trip(array):
    found = parse_idx(encode(array), array.shape)
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize("position", range(16))
@given(byte=st.integers(0, 255))
def test_every_byte_of_the_header_counts(position, byte):
    assume(byte != EXAMPLE[position])
    data = EXAMPLE[:position] + bytes([byte]) + EXAMPLE[position + 1 :]
    with pytest.raises(ValueError, match="magic number" if position < 4 else "shape"):
        parse_idx(data, (2, 3, 4))


@given(ARRAYS, SHAPES)
def test_another_shape_is_an_error(array, shape):
    assume(shape != array.shape)
    with pytest.raises(ValueError, match=r"magic number|shape"):
        parse_idx(encode(array), shape)


@given(st.data())
def test_too_few_bytes_are_an_error(data):
    length = data.draw(st.integers(0, len(EXAMPLE) - 1))
    with pytest.raises(ValueError, match=r"magic number|ends after|bytes of data"):
        parse_idx(EXAMPLE[:length], (2, 3, 4))


@given(ARRAYS, st.binary(min_size=1))
def test_too_many_bytes_are_an_error(array, more):
    with pytest.raises(ValueError, match="bytes of data"):
        parse_idx(encode(array) + more, array.shape)


def test_messages():
    def message(data: bytes) -> str:
        with pytest.raises(ValueError) as caught:
            parse_idx(data, (2, 3, 4))
        return str(caught.value)

    floats = b"\0\0\x0d\x03" + EXAMPLE[4:]
    assert message(floats) == "its IDX magic number is 0x00000d03, not 0x00000803"
    assert message(EXAMPLE[:9]) == "its IDX header ends after 9 of 16 bytes"
    larger = encode(np.zeros((2, 4, 3), np.uint8))
    assert message(larger) == "its IDX header gives the shape (2, 4, 3), not (2, 3, 4)"
    assert message(EXAMPLE[:-1]) == (
        "it holds 23 bytes of data, but its IDX header promises 24"
    )


@given(st.binary())
def test_gunzip(data):
    assert gunzip(gzip.compress(data)) == data


@given(st.binary(), st.data())
def test_gunzip_of_truncated_data_is_an_error(content, data):
    packed = gzip.compress(content)
    packed = packed[: data.draw(st.integers(2, len(packed) - 1))]
    with pytest.raises(ValueError, match=f"end after {len(packed)} bytes"):
        gunzip(packed)


@given(st.binary(min_size=1), st.data())
def test_gunzip_never_returns_other_data(content, data):
    packed = bytearray(gzip.compress(content))
    # After the header: the compressed data, their checksum and their length.
    position = data.draw(st.integers(10, len(packed) - 1))
    packed[position] ^= data.draw(st.integers(1, 255))
    try:
        assert gunzip(bytes(packed)) == content  # the bit has no meaning
    except ValueError as error:
        assert any(words in str(error) for words in ("corrupt", "end after"))


def test_gunzip_stops_at_a_size():
    packed = gzip.compress(bytes(2**20)) * 1000
    with pytest.raises(ValueError, match=r"^it has more than 1,000 bytes$"):
        gunzip(packed, 1000)
    assert gunzip(gzip.compress(bytes(1000)), 1000) == bytes(1000)


def test_gunzip_checks_the_checksum():
    packed = bytearray(gzip.compress(b"garment"))
    packed[-5] ^= 1
    with pytest.raises(ValueError, match=r"its gzip data are corrupt .*CRC"):
        gunzip(bytes(packed))


def test_gunzip_of_other_data_is_an_error():
    with pytest.raises(ValueError, match="it is empty"):
        gunzip(b"")
    with pytest.raises(ValueError, match="it is not a gzip file"):
        gunzip(b"<html>404</html>")
