import io

import numpy as np
import PIL.Image
import pytest

import eqxshard
from eqxshard.trackers import Image, TensorBoard


@pytest.fixture
def read(tmp_path):
    """Returns the values in the event files: (step, value) by name."""
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def read_events():
        # The default keeps a sample of the steps.
        events = module.EventAccumulator(str(tmp_path), size_guidance={"scalars": 0})
        events.Reload()
        return {
            name: [(event.step, event.value) for event in events.Scalars(name)]
            for name in events.Tags()["scalars"]
        }

    return read_events


@pytest.mark.parametrize("channels, mode", [(1, "L"), (3, "RGB"), (4, "RGBA")])
def test_images_are_read_back(tmp_path, channels, mode):
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    pixels = np.random.default_rng(0).integers(256, size=(5, 7, channels), dtype=np.uint8)
    tracker = TensorBoard(tmp_path)
    tracker.log(7, {"x": Image(pixels), "train/loss": 1.0})
    tracker.close()
    events = module.EventAccumulator(str(tmp_path))
    events.Reload()
    tags = events.Tags()
    assert (tags["images"], tags["scalars"]) == (["x"], ["train/loss"])
    (image,) = events.Images("x")
    assert (image.step, image.width, image.height) == (7, 7, 5)
    decoded = PIL.Image.open(io.BytesIO(image.encoded_image_string))
    assert (decoded.format, decoded.mode) == ("PNG", mode)
    np.testing.assert_array_equal(np.asarray(decoded).reshape(pixels.shape), pixels)


def test_values_are_in_the_file_when_log_returns(tmp_path, read):
    tracker = TensorBoard(tmp_path)
    assert isinstance(tracker, eqxshard.trackers.Tracker)
    tracker.log(1, {"epoch": 0.5, "train/loss": 2.0})
    assert read() == {"epoch": [(1, 0.5)], "train/loss": [(1, 2.0)]}
    tracker.log(2, {"train/loss": np.float64(1.5), "eval/accuracy": 0.25})
    assert read() == {
        "epoch": [(1, 0.5)],
        "train/loss": [(1, 2.0), (2, 1.5)],
        "eval/accuracy": [(2, 0.25)],
    }
    tracker.close()


@pytest.mark.parametrize(
    "purge_after, steps",
    [(2, [0, 1, 2, 9]), (0, [0, 9]), (-1, [9]), (None, [0, 1, 2, 3, 9])],
)
def test_a_resumed_run_hides_the_steps_that_it_takes_again(
    tmp_path, read, purge_after, steps
):
    tracker = TensorBoard(tmp_path)
    for step in (0, 1, 2, 3):
        tracker.log(step, {"train/loss": 1.0})
    tracker.close()
    # TensorBoard reads files by name, and those of the same second in no useful order.
    (first,) = tmp_path.iterdir()
    first.rename(tmp_path / "events.out.tfevents.0000000001.first")
    tracker = TensorBoard(tmp_path, purge_after=purge_after)
    tracker.log(9, {"train/loss": 1.0})
    tracker.close()
    assert [step for step, _ in read()["train/loss"]] == steps
