import io

import numpy as np
import PIL.Image
import pytest

from eqxshard.trackers._png import encode_png


@pytest.mark.parametrize("channels, mode", [(1, "L"), (3, "RGB"), (4, "RGBA")])
def test_a_picture_is_what_pillow_reads(channels, mode):
    pixels = np.random.default_rng(0).integers(256, size=(5, 7, channels), dtype=np.uint8)
    image = PIL.Image.open(io.BytesIO(encode_png(pixels)))
    image.load()
    assert (image.format, image.mode, image.size) == ("PNG", mode, (7, 5))
    np.testing.assert_array_equal(np.asarray(image).reshape(pixels.shape), pixels)
