import pytest

from eqxshard.debug._doctor._facts import Devices, version_key


@pytest.mark.parametrize(
    "older, newer", [("0.9", "0.10.1"), ("0.10.2", "0.12"), ("2.1rc1", "2.2"), ("", "1")]
)
def test_versions_are_compared_by_their_numbers(older, newer):
    assert version_key(older) < version_key(newer)


def test_zeros_at_the_end_are_none():
    assert version_key("2.0.0") == version_key("2")


def test_devices_of_several_kinds_are_counted():
    assert Devices("gpu", {"A": 2, "B": 1}).count == 3
