import pytest
import restore_memory


@pytest.mark.thorough
def test_restoring_takes_the_memory_of_the_state_and_one_shard():
    results = restore_memory.measure(2**30)
    assert results.keys() == restore_memory.SPLITS.keys()
    for split, result in results.items():
        assert 2**30 <= result.peak <= result.allowed, (split, result)
