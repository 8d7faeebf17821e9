import dataclasses
import json

import pytest
from page_parser import assert_accessible, assert_loads_nothing, parse, rows

from eqxshard.inspect import Finding
from eqxshard.inspect._lint import Findings
from eqxshard.sharding._text import format_bytes


@pytest.fixture(scope="module")
def page(plan, tmp_path_factory):
    file = tmp_path_factory.mktemp("page") / "new" / "plan.html"
    plan.save(file)
    return parse(file.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_a_plan_is_saved_as_its_name_says(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    values = json.loads((tmp_path / "plan.json").read_text())
    assert values == json.loads(json.dumps(plan.to_json()))
    plan.save(str(tmp_path / "plan.HTML"))
    assert (tmp_path / "plan.HTML").read_text().startswith("<!doctype html>")
    with pytest.raises(ValueError, match=r"as 'plan\.txt'; give a name that ends with"):
        plan.save(tmp_path / "plan.txt")


def page_of(plan, tmp_path):
    plan.save(tmp_path / "plan.html")
    return parse((tmp_path / "plan.html").read_text())


def test_the_headline_says_what_bounds_the_step(plan, page, tmp_path):
    assert page.find("h1").text.startswith("A step takes at least ")
    assert page.find("h1").text.endswith(f"bound by {plan.time.bound}")
    tiles = {x.find("dt").text: x.find("dd").text for x in page.find("dl").find_all("div")}
    speed = round(plan.examples_per_second, -4)
    assert tiles["Speed"].startswith(f"{speed:,.0f} examples/s")
    used = f"{plan.mfu:.0%}of the peak, at that speed; HFU: {plan.hfu:.0%}"
    assert tiles["MFU"] == used
    assert tiles["Memory of a device"].endswith("of 151.40 GB: it fits")
    memory = dataclasses.replace(plan.memory, device=plan.memory.peak - 2000)
    small = page_of(dataclasses.replace(plan, memory=memory), tmp_path)
    assert small.find("h1").text == "It does not fit: each device lacks 2.00 kB"


def numbers(cells):
    return [x.text for x in cells if x.attributes.get("class") == "number"]


def test_arrays_and_collectives_are_those_of_the_plan(plan, page):
    found = {cells[0].text: cells for cells in rows(page, "arrays")}
    assert found.keys() == {leaf.path for leaf in plan.leaves}
    for leaf in plan.leaves:
        sizes = [leaf.bytes_per_device, leaf.gradient, leaf.optimizer, leaf.total]
        assert numbers(found[leaf.path]) == [*map(format_bytes, sizes)]
    largest = sorted(plan.collectives, key=lambda each: -each.sent_in_all)
    for cells, each in zip(rows(page, "collectives"), largest, strict=True):
        assert cells[0].text == ",".join(each.axes or ()) and cells[1].text == each.kind
        sizes = format_bytes(each.sent), format_bytes(each.sent_in_all)
        assert numbers(cells)[:3] == [f"{each.times:,}", *sizes]
        assert cells[7].text.startswith(", ".join(each.leaves))
        assert cells[7].text.endswith(each.line or "")


def test_findings_notes_and_settings_are_listed(plan, page, tmp_path):
    assert not page.find_all("section", id="findings")
    finding = Finding("constant", None, "model.py:3", "a table is compiled in.")
    found = page_of(dataclasses.replace(plan, findings=Findings([finding])), tmp_path)
    (item,) = found.find("section", id="findings").find_all("li")
    assert item.text == "model.py:3: a table is compiled in."
    notes = page.find("section", id="notes").find_all("li")
    assert [x.text for x in notes] == [*plan.notes]
    names = [x.text for x in page.find("section", id="settings").find_all("dt")]
    assert {"rule", "batch", "accumulate"} <= {*names} and {*plan.settings} <= {*names}


def test_everything_is_escaped_and_nothing_is_loaded(plan, page, tmp_path):
    assert_loads_nothing(page)
    assert_accessible(page)
    bad = "</script><b>&\"'"
    leaves = (dataclasses.replace(plan.leaves[0], path=bad, dtype=bad),)
    collective = dataclasses.replace(plan.collectives[0], line=bad, leaves=(bad,) * 5)
    plan = dataclasses.replace(
        plan,
        target=dataclasses.replace(plan.target, kind=bad),
        leaves=leaves,
        collectives=(collective,),
        notes=(bad,),
        settings={bad: bad},
    )
    found = page_of(plan, tmp_path)
    text = (tmp_path / "plan.html").read_text()
    assert "</script>" not in text and "<b>" not in text
    assert rows(found, "arrays")[0][0].text == bad
    assert found.find("section", id="settings").find("dt").text == bad
