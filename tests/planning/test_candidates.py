import re

import pytest
from plan_helpers import by_hand, not_compiled

import eqxshard

FSDP = by_hand({"fsdp": 8}, step=0.101, fsdp=0.012)
BOTH = by_hand({"data": 2, "fsdp": 4}, step=0.1, data=0.01)


def test_a_search_prints_a_column_for_each_cost():
    found = (FSDP, BOTH, not_compiled("data", int(160e9)))
    head, table = str(eqxshard.Search(FSDP.plan, found, 3.2)).split("\n\n")
    assert head == "3 candidates, of which 2 were compiled and 2 fit, in 3 s"
    rows = [[cell.strip() for cell in re.split("[┃│]", x)] for x in table.splitlines()]
    _, names, _, *rows, _ = [row[1:-1] for row in rows]
    assert names == [
        *("candidate", "memory", "step", "mfu", "arithmetic", "fsdp links", "data links"),
        "why it does not run",
    ]
    assert rows == [
        ["fsdp=8", "20.00 GB", "0.101 s", "0%", "89 ms", "12 ms", "", ""],
        ["data=2, fsdp=4", "20.00 GB", "0.1 s", "0%", "90 ms", "", "10 ms", ""],
        ["data", "> 160.00 GB", "", "", "", "", "", "because"],
    ]


@pytest.mark.parametrize(
    "nearest, advice",
    [
        (by_hand({"fsdp": 8}, 150 * 10**9, fits=False), "try a larger accumulate"),
        (not_compiled("data", int(160e9)), "even without activations; try more devices"),
        (not_compiled("data", None), "Nothing can be compiled; the last column says why."),
    ],
)
def test_if_nothing_fits_the_last_line_says_what_to_try(nearest, advice):
    assert advice in str(eqxshard.Search(None, (nearest,), 1.0)).splitlines()[-1]
    assert eqxshard.Search(None, (nearest,), 1.0).to_json()["best"] is None
