import os
import pickle
import sys
import zlib

import numpy as np
import pytest
from hostile_files import forbid
from loader_helpers import loader_of, take
from PIL import Image
from PIL.PngImagePlugin import PngInfo

import eqxshard
from eqxshard.data import ImageFolder


@pytest.fixture
def folder(tmp_path):
    """Two classes of plain colours, some of them deeper down, and other files."""
    for name, value in {
        "cat/0.png": 0,
        "cat/1.PNG": 10,
        "dog/a/2.jpg": 20,
        "dog/3.png": 30,
    }.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 8), (value, value, value)).save(file)
    (tmp_path / "dog/notes.txt").write_text("not an image")
    (tmp_path / "README.md").write_text("not a class")
    return tmp_path


@pytest.mark.versions
def test_images_have_the_class_of_their_folder(folder):
    source = ImageFolder(folder, size=8)
    assert len(source) == 4
    assert source.classes == ["cat", "dog"]
    assert [os.path.relpath(file, folder) for file, _ in source.files] == [
        os.path.join(*parts)
        for parts in (
            ("cat", "0.png"),
            ("cat", "1.PNG"),
            ("dog", "3.png"),
            ("dog", "a", "2.jpg"),
        )
    ]
    batch = source.gather(np.array([3, 0, 1, 2, 0]))
    assert batch["label"].tolist() == [1, 0, 0, 1, 0]
    assert batch["label"].dtype == np.int32
    assert batch["image"].dtype == np.uint8 and batch["image"].shape == (5, 8, 8, 3)
    assert batch["image"][:, 4, 4, 1].tolist() == [20, 0, 10, 30, 0]
    assert repr(source) == "ImageFolder(4 x uint8[8, 8, 3], 2 classes)"


def test_images_are_scaled_and_cropped_in_the_middle(tmp_path):
    (tmp_path / "a").mkdir()
    # Wide: black, then a white square, then black.
    pixels = np.zeros((64, 128, 3), np.uint8)
    pixels[:, 32:96] = 255
    for number, suffix in enumerate(["png", "jpg"]):
        Image.fromarray(pixels).save(tmp_path / "a" / f"{number}.{suffix}")
        Image.fromarray(pixels[:, :, 0]).save(tmp_path / "a" / f"grey{number}.{suffix}")
    source = ImageFolder(tmp_path, size=(16, 32))
    image = source.gather(np.arange(4))["image"].astype(int)
    assert image.shape == (4, 16, 32, 3)
    assert (image[:, :, 10:22] > 240).all()
    assert (image[:, :, [0, 1, 2, 3, -4, -3, -2, -1]] < 15).all()
    assert (ImageFolder(tmp_path, size=16).gather(np.arange(4))["image"] > 200).all()


@pytest.mark.parametrize("name", ["x.png", "x.tif", "big.tif", "x.pgm"])
def test_images_of_16_bits_keep_the_upper_ones(tmp_path, monkeypatch, name):
    values = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000
    image = Image.fromarray(values)
    if name == "big.tif":
        image = Image.frombytes("I;16B", (8, 8), values.astype(">u2").tobytes())
    (tmp_path / "a").mkdir()
    # Pillow reads a PGM of 16 bits in 32, as older versions of it do a PNG.
    file = tmp_path / "a" / name.replace("pgm", "png")
    image.save(file, "PPM" if name == "x.pgm" else None)
    found = ImageFolder(tmp_path, size=8).gather(np.array([0]))["image"][0]
    np.testing.assert_array_equal(found, np.stack([values >> 8] * 3, axis=-1))


@pytest.mark.parametrize("mode, dtype", [("I", np.int32), ("F", np.float32)])
def test_images_of_32_bits_are_refused(tmp_path, mode, dtype):
    (tmp_path / "a").mkdir()
    pixels = np.arange(64, dtype=dtype).reshape(8, 8) * 10_000
    Image.fromarray(pixels).save(tmp_path / "a" / "x.tif")
    says = rf"x\.tif has pixels of 32 bits \(Pillow's mode {mode}\), .*; convert it"
    with pytest.raises(ValueError, match=says):
        ImageFolder(tmp_path, size=8).gather(np.array([0]))


def test_loaders_of_images_can_be_pickled_and_augmented(folder):
    source = pickle.loads(pickle.dumps(ImageFolder(folder, size=(8, 12))))

    def crop(batch, generators):
        left = [generator.integers(5) for generator in generators]
        images = [image[:, x : x + 8] for image, x in zip(batch["image"], left)]
        return {**batch, "image": np.stack(images)}

    transform = eqxshard.data.RandomTransform(crop)
    (batch,) = take(loader_of(source, batch_size=4, transform=transform, epochs=1))
    assert batch["image"].shape == (4, 8, 8, 3)
    assert sorted(batch["image"][:, 0, 0, 0].tolist()) == [0, 10, 20, 30]


@pytest.mark.parametrize("damage", ["text", "cut", "fifo", "bomb", "long text"])
def test_a_file_that_cannot_be_decoded_is_an_error_that_names_it(folder, damage):
    file = folder / "dog/a/2.jpg"
    content = {"text": b"text", "cut": file.read_bytes()[:-300]}
    if damage == "fifo":
        file.unlink()
        forbid(file, "fifo")
    elif damage == "bomb":
        # 64 gigapixels.
        Image.new("1", (2**18, 1)).save(file, "png")
        data = bytearray(file.read_bytes())
        data[20:24] = (2**18).to_bytes(4, "big")
        data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
        file.write_bytes(data)
    elif damage == "long text":
        more = PngInfo()
        more.add_text("x", "x" * 2**27, zip=True)
        Image.new("RGB", (1, 1)).save(file, "png", pnginfo=more)
    else:
        file.write_bytes(content[damage])
    source = ImageFolder(folder, size=8)
    with pytest.raises(ValueError, match=r"2\.jpg cannot be decoded \(.*\); replace it"):
        source.gather(np.arange(4))


def test_a_folder_without_images_is_an_error(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ValueError, match="has no images in folders; give a folder"):
            ImageFolder(path, size=8)
    with pytest.raises(ValueError, match=r"size=.* must be at least 1"):
        ImageFolder(tmp_path, size=(8, 0))


def test_without_pillow_there_are_no_images(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ImportError, match=r"pip install 'eqxshard\[images\]'"):
        ImageFolder(folder, size=8)
