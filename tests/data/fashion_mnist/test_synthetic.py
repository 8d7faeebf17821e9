import numpy as np
import pytest

from eqxshard.data import ArraySource, synthetic_fashion


@pytest.fixture(scope="module")
def train():
    return synthetic_fashion("train", size=5_000)


@pytest.fixture(scope="module")
def test():
    return synthetic_fashion("test", size=2_000)


def images(source: ArraySource) -> np.ndarray:
    return source.arrays["image"]


def labels(source: ArraySource) -> np.ndarray:
    return source.arrays["label"]


def test_images_and_labels(train):
    assert len(train) == 5_000
    assert images(train).shape == (5_000, 28, 28)
    assert images(train).dtype == np.uint8
    assert labels(train).shape == (5_000,)
    assert labels(train).dtype == np.int32
    assert set(train.arrays) == {"image", "label"}


def test_default_size():
    assert len(synthetic_fashion("test")) == 10_000


def test_classes_are_balanced_and_mixed(train):
    np.testing.assert_array_equal(np.bincount(labels(train)), [500] * 10)
    assert len(set(labels(train)[:100])) == 10


@pytest.mark.parametrize("size", [1, 9, 23])
def test_any_size(size):
    source = synthetic_fashion("train", size=size)
    counts = np.bincount(labels(source), minlength=10)
    assert counts.sum() == size
    assert np.ptp(counts) <= 1


def test_the_seed_decides():
    first, again, other = (synthetic_fashion("train", seed=s, size=50) for s in (1, 1, 2))
    np.testing.assert_array_equal(images(first), images(again))
    np.testing.assert_array_equal(labels(first), labels(again))
    assert (images(first) != images(other)).any()
    assert (labels(first) != labels(other)).any()


def test_no_image_is_in_both_splits(train):
    test = synthetic_fashion("test", size=len(train))
    seen = {image.tobytes() for image in images(train)}
    assert len(seen) == len(train)
    assert not any(image.tobytes() in seen for image in images(test))


def test_the_background_is_black(train):
    background = (images(train) == 0).mean(axis=(1, 2))
    assert background.min() > 0.1
    assert background.max() < 0.95
    assert images(train).max() == 255


def test_trousers_are_tall_and_shoes_are_wide(train):
    def widths_by_heights(kind: int) -> np.ndarray:
        drawn = images(train)[labels(train) == kind] > 0
        return drawn.any(axis=1).sum(axis=1) / drawn.any(axis=2).sum(axis=1)

    assert (widths_by_heights(1) < 1).all()  # trousers
    assert (widths_by_heights(7) > 1).all()  # sneakers


def test_garments_that_hang_are_symmetric(train):
    """On average: single images have random pixels, and are tilted and shifted."""

    def asymmetry(of: list[int]) -> float:
        mean = images(train)[np.isin(labels(train), of)].mean(axis=0)
        return np.abs(mean - mean[:, ::-1]).mean() / mean.mean()

    assert asymmetry([0, 1, 2, 3, 4, 6, 8]) < 0.05
    assert asymmetry([5, 7, 9]) > 0.2


def test_classes_can_be_learned_but_not_perfectly(train, test):
    """Nearest centroids: far better than the 10 % of chance, far from perfect."""
    centroids = np.stack(
        [images(train)[labels(train) == k].mean(axis=0) for k in range(10)]
    )
    offsets = images(test)[:, None] - centroids
    guesses = np.argmin((offsets**2).sum(axis=(2, 3)), axis=1)
    accuracy = (guesses == labels(test)).mean()
    assert 0.4 < accuracy < 0.95


def test_shirts_are_mistaken_for_t_shirts(train, test):
    """Classes overlap, which keeps a good model from 99 %."""

    def outlines(source: ArraySource, kind: int) -> np.ndarray:
        return (images(source)[labels(source) == kind] > 0).reshape(-1, 28 * 28)

    shirts = outlines(test, 6)
    distances = [
        np.min((shirts[:, None] != outlines(train, kind)).sum(axis=2), axis=1)
        for kind in (0, 6)
    ]
    nearer_a_t_shirt = (distances[0] < distances[1]).mean()
    assert 0.1 < nearer_a_t_shirt < 0.9


def test_an_unknown_split_is_an_error():
    with pytest.raises(ValueError, match="split='validation' is not 'train' or 'test'"):
        synthetic_fashion("validation")


@pytest.mark.parametrize("size", [0, -1])
def test_size_must_be_positive(size):
    with pytest.raises(ValueError, match=f"size={size} must be at least 1"):
        synthetic_fashion("train", size=size)
