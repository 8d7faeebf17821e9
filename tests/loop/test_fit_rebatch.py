"""A run that goes on at another batch size: its epochs end where their examples end."""

import numpy as np
import pytest
from loop_helpers import ROWS, Recorder, fresh, make_loader

import eqxshard


class Seen:
    """A step that notes the examples of its batches, of which `make_loader` has 48."""

    def __init__(self, step):
        self.step = step
        x = make_loader().shapes()["x"]
        assert x.shape[1:] == (4,)
        source = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
        self.numbers = {row.tobytes(): i for i, row in enumerate(source)}
        self.batches: list[list[int]] = []

    def __call__(self, state, batch):
        x, weight = np.asarray(batch["x"]), batch.get("__weight__")
        real = np.ones(len(x), bool) if weight is None else np.asarray(weight) > 0
        self.batches.append([self.numbers[row.tobytes()] for row in x[real]])
        return self.step(state, batch)


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["host", "device"])
def test_epochs_end_where_their_examples_end(tmp_path, placement):
    options = {"shuffle": True, "placement": placement}
    order = [make_loader(**options).rows(step).tolist() for step in range(18)]
    whole = np.concatenate(order).tolist()

    def go_on(batch_size, *, rebatch=None, **until):
        state, step = fresh()
        checkpointer = eqxshard.Checkpointer(tmp_path, max_to_keep=9, save_every=4)
        loader = make_loader(batch_size=batch_size, **options)
        if checkpointer.steps():
            state = checkpointer.restore(state)
            if rebatch is not None:
                saved = checkpointer.description(int(state.step))["loader"]
                loader.restore(saved, rebatch=rebatch)
        seen, recorder, evaluated = Seen(step), Recorder(), []
        first = int(state.step)
        eqxshard.fit(
            state,
            seen if placement == "host" else step,
            loader,
            evaluate=lambda model: evaluated.append(1) or {"x": 1.0},
            checkpointer=checkpointer,
            trackers=[recorder],
            log_every=100,
            **until,
        )
        epochs = {step: values["epoch"] for step, values in recorder.lines}
        if placement == "host":
            last = loader.state()["step"]
            rows = [loader.rows(step).tolist() for step in range(first, last)]
            assert seen.batches == rows
        return seen.batches, epochs, len(evaluated)

    before, _, _ = go_on(8, steps=4)
    with pytest.raises(ValueError, match=r"was 8 and is 32; .*restore\(state, rebatch=Tr"):
        go_on(32, steps=4)
    # 16 of 48 examples are left, fewer than a batch.
    middle, epochs, evaluations = go_on(32, rebatch=True, steps=8)
    # Three steps to the end of the second epoch, one into the third.
    assert [*map(len, middle)] in ([16, 32, 16, 32], [])
    assert epochs == {5: 1, 7: 2, 8: 2.5} and evaluations == 3
    # Without a word, and with an end in epochs.
    after, epochs, evaluations = go_on(32, epochs=3)
    assert epochs == {9: 3} and evaluations == 1
    if placement == "host":
        assert [row for batch in before + middle + after for row in batch] == whole[
            : 3 * 48
        ]
