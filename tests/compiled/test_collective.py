import dataclasses

from eqxshard.compiled._collective import Collective, join_axes

GATHER = Collective("all-gather", ("f32[8]",), 32, sent=28, times=3, in_loop=True)


def test_what_is_sent_in_all_counts_iterations_that_are_known():
    assert GATHER.sent_in_all == 3 * 28
    assert dataclasses.replace(GATHER, times=None).sent_in_all == 28


def test_axes_as_one_word():
    assert (join_axes(("data", "fsdp")), join_axes(None)) == ("data,fsdp", "unknown")
