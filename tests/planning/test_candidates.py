import json

import eqxshard


def candidate(name, plan=None, needs=None, fits=False):
    return eqxshard.Candidate(name, {"fsdp": 8}, "", "", 1, plan, needs, fits, "because")


def test_a_search_prints_as_a_table(plan):
    found = (candidate("fsdp=8", plan, 10**9, True), candidate("data=8", None, 2 * 10**9))
    search = eqxshard.Search(plan, found, "fsdp=8 wins.", 3.2)
    head, table, why = str(search).split("\n\n")
    assert head == "2 candidates, of which 1 were compiled and 1 fit, in 3 s"
    assert "1.00 GB" in table and "> 2.00 GB" in table and "because" in table
    assert why == "fsdp=8 wins."


def test_a_search_is_plain_values_for_json(plan):
    found = (candidate("fsdp=8", plan, 10**9, True), candidate("data=8"))
    plain = json.loads(json.dumps(eqxshard.Search(plan, found, "why", 3.2).to_json()))
    assert plain["best"] == plain["candidates"][0]
    assert plain["best"]["plan"]["memory"]["peak"] == plan.memory.peak
    assert plain["candidates"][1]["plan"] is None and plain["why"] == "why"
    assert eqxshard.Search(None, found[1:], "", 1.0).to_json()["best"] is None
