"""Power that is lost while checkpoints are written and removed."""

import os
import random
from pathlib import Path

import pytest
from checkpoint_helpers import like, new_state
from helpers import assert_equal, make_loader
from power import Disk

import eqxshard


def complete(folder):
    names = [path.parent.name for path in folder.glob("*/checksums.txt")]
    return sorted(map(int, names))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_power_lost_at_any_moment_leaves_the_newest_checkpoint_or_the_one_before(
    tmp_path, checkpoints, train_step, monkeypatch, seed
):
    """Without a seed all is lost that was not synced, else what chance decides."""
    folder, safe = tmp_path / "run", tmp_path / "safe"
    folder.mkdir()
    rng, losses = random.Random(seed), list[tuple[Path, list[int]]]()
    disk = Disk(folder, safe)

    def lose():
        there = tmp_path / f"lost {len(losses)}"
        losses.append((there, complete(folder)))
        disk.lose(there, None if seed is None else rng)

    def then_maybe_lose(call):
        def called(*args, **kwargs):
            result = call(*args, **kwargs)
            if rng.random() < 0.2:
                lose()
            return result

        return called

    with disk.recording(), monkeypatch.context() as patch:
        for name in ("fsync", "replace", "unlink", "rmdir"):
            patch.setattr(os, name, then_maybe_lose(getattr(os, name)))
        checkpointer = eqxshard.Checkpointer(folder, max_to_keep=1, save_every=1)
        loader = make_loader()
        state = eqxshard.fit(
            new_state(), train_step, loader, steps=9, checkpointer=checkpointer
        )
        lose()
    assert complete(losses[-1][0])[-1] == 9
    assert len(losses) > 20 and len({tuple(steps) for _, steps in losses}) > 9
    for number, (there, steps) in enumerate(losses):
        checkpointer = eqxshard.Checkpointer(there, save_every=1)
        if not checkpointer.steps() and steps in ([], [1]):
            continue
        state = checkpointer.restore(like())
        assert int(state.step) in (steps[-1], steps[-1] - 1), (there.name, steps)
        if number % 8 == 0:
            state = eqxshard.fit(
                state, train_step, make_loader(), steps=10, checkpointer=checkpointer
            )
            assert_equal(state, checkpoints[1])
