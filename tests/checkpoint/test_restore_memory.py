import pytest
import restore_memory


@pytest.mark.thorough
def test_restoring_takes_the_memory_of_the_state_and_one_shard():
    results = restore_memory.measure(2**30)
    assert results.keys() == restore_memory.SPLITS.keys()
    for split, result in results.items():
        assert 2**30 <= result.peak <= result.allowed, (split, result)


@pytest.mark.slow
def test_saving_and_restoring_take_one_more_state(tmp_path):
    """Besides the state, and about 70 MiB on their way to the disk, whatever the size."""
    peaks = restore_memory.in_child(restore_memory.train_and_save, tmp_path, 3 * 2**27)
    assert all(0.7 <= peak <= 1.4 for peak in peaks.values()), peaks
