import dataclasses
import json
import re

import pytest
from browser import assert_fits_without_errors, browser, open_page
from page_parser import assert_loads_nothing, parse, rows

import eqxshard
from eqxshard.inspect._lint import Findings

_ = browser  # A fixture.


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
    assert len(values["leaves"]) == len(plan.leaves)
    plan.save(str(tmp_path / "plan.HTML"))
    assert (tmp_path / "plan.HTML").read_text().startswith("<!doctype html>")
    with pytest.raises(
        ValueError, match=r"as 'plan\.txt'; give a name that ends with \.json"
    ):
        plan.save(tmp_path / "plan.txt")


def test_the_headline_says_what_bounds_the_step(plan, page):
    assert page.find("h1").text.startswith("A step takes at least ")
    assert page.find("h1").text.endswith(f"bound by {plan.time.bound}")
    tiles = {x.find("dt").text: x.find("dd").text for x in page.find("dl").find_all("div")}
    assert tiles["Tokens per second"].startswith(f"{plan.tokens_per_second:,.0f}")
    assert tiles["MFU"].startswith(f"{plan.mfu:.0%}")
    assert tiles["Memory of a device"].endswith("of 151.40 GB: it fits")


def test_what_does_not_fit_is_said_first(plan, tmp_path):
    memory = dataclasses.replace(plan.memory, device=plan.memory.peak - 2000)
    dataclasses.replace(plan, memory=memory).save(tmp_path / "plan.html")
    found = parse((tmp_path / "plan.html").read_text())
    assert found.find("h1").text == "It does not fit: each device lacks 2.00 kB"


def test_without_known_speeds_there_is_a_page(plan, tmp_path):
    memory = dataclasses.replace(plan.memory, device=None)
    target = eqxshard.Target.named("cpu")
    other = dataclasses.replace(plan, target=target, time=None, memory=memory)
    other.save(tmp_path / "plan.html")
    found = parse((tmp_path / "plan.html").read_text())
    assert found.find("h1").text.startswith("A step needs ")
    assert "time" not in [x.attributes.get("id") for x in found.find_all("section")]


def values(cells):
    return [
        float(x.attributes["data-value"]) for x in cells if "data-value" in x.attributes
    ]


def test_arrays_are_those_of_the_plan(plan, page):
    found = {cells[0].text: cells for cells in rows(page, "leaves")}
    assert len(found) == len(plan.leaves)
    for leaf in plan.leaves:
        cells = found[leaf.path]
        sizes = [leaf.bytes, leaf.gradient, leaf.optimizer, leaf.total]
        assert values(cells)[1:] == sizes
        assert [x.text for x in cells[1:4]] == [
            *(" x ".join(map(str, leaf.shape)), leaf.dtype, leaf.spec)
        ]


def test_collectives_are_those_of_the_plan(plan, page):
    largest = sorted(plan.collectives, key=lambda each: -each.sent_in_all)
    found = rows(page, "collectives")
    for cells, each in zip(found, largest, strict=True):
        assert cells[0].text == ",".join(each.axes or ()) and cells[1].text == each.kind
        assert values(cells) == [each.times, each.sent, each.sent_in_all]
        assert [x.text for x in cells[7].find_all("code")] == [*each.leaves]
        assert cells[7].text.endswith(each.line or "")
    sent = sum(sum(kinds.values()) for kinds in plan.traffic.values())
    assert sum(values(cells)[2] for cells in found) == sent


def test_traffic_is_drawn_by_axes_and_kind(plan, page):
    section = page.find("section", id="traffic")
    named = {x.text for x in section.find_all("th")}
    pairs = {f"{axes} {kind}" for axes, kinds in plan.traffic.items() for kind in kinds}
    assert named == pairs


def test_findings_are_listed(plan, page, tmp_path):
    assert not page.find_all("section", id="findings")
    finding = eqxshard.Finding("constant", None, "model.py:3", "a table is compiled in.")
    other = dataclasses.replace(plan, findings=Findings([finding]))
    other.save(tmp_path / "plan.html")
    section = parse((tmp_path / "plan.html").read_text()).find("section", id="findings")
    assert section.find("li").text == "constant: model.py:3: a table is compiled in."


def test_loops_are_summed(plan, tmp_path):
    loop = eqxshard.PlannedSpan("loop", 1.0, 2.0, 3)
    spans = (
        eqxshard.PlannedSpan("compute", 0.0, 1.0),
        loop,
        dataclasses.replace(loop, kind="memory"),
    )
    time = dataclasses.replace(plan.time, waiting=plan.time.links)
    dataclasses.replace(plan, timeline=spans, time=time).save(tmp_path / "plan.html")
    found = parse((tmp_path / "plan.html").read_text())
    *_, table = found.find("section", id="time").find_all("table")
    body = table.find("tbody")
    texts = [[cell.text for cell in row] for row in body.find_all("tr")]
    assert texts == [
        ["loop 1", "3 times", "3 s", "75%"],
        ["outside loops", "once", "1 s", "25%"],
    ]


def test_notes_and_settings_are_there(plan, page):
    notes = page.find("section", id="notes").find_all("li")
    assert [x.text for x in notes] == [f"{note}." for note in plan.notes]
    settings = page.find("section", id="settings")
    names = [x.text for x in settings.find_all("dt")]
    assert {"rule", "batch", "accumulate"} <= {*names} and {*plan.settings} <= {*names}


def test_everything_is_escaped(plan, tmp_path):
    bad = "</script><b>&\"'"
    leaves = (dataclasses.replace(plan.leaves[0], path=bad, spec=bad, dtype=bad),)
    collective = dataclasses.replace(plan.collectives[0], line=bad, leaves=(bad,) * 5)
    plan = dataclasses.replace(
        plan,
        target=dataclasses.replace(plan.target, kind=bad),
        leaves=leaves,
        collectives=(collective,),
        notes=(bad,),
        settings={bad: bad},
    )
    plan.save(tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text()
    assert text.count("</script>") == 1 and "<b>" not in text
    found = parse(text)
    assert rows(found, "leaves")[0][0].text == bad
    assert found.find("section", id="settings").find("dt").text == bad


def test_it_loads_nothing(page):
    assert_loads_nothing(page)


def test_it_can_be_read_by_ear_and_used_by_keyboard(page):
    levels = [x.tag for x in page if re.fullmatch(r"h\d", x.tag)]
    assert levels == ["h1"] + ["h2"] * (len(levels) - 1)
    assert page.find("html").attributes["lang"] == "en"
    for name in ("leaves", "collectives"):
        heads = page.find("table", id=f"{name}-table").find("thead").find_all("th")
        assert all(len(head.find_all("button")) == 1 for head in heads)
        order = [x.text for x in heads if x.attributes["aria-sort"] == "descending"]
        assert order == ["In all"]
        field = page.find("input", id=f"{name}-search")
        assert page.find("label", **{"for": field.attributes["id"]}).text
    assert all("caption" in [x.tag for x in table] for table in page.find_all("table"))
    scrollers = page.find_all("div", class_="scroller")
    assert all(x.attributes["tabindex"] == "0" for x in scrollers)
    ids = [x.attributes["id"] for x in page if "id" in x.attributes]
    assert len(ids) == len({*ids})


TEXTS = """
return [...document.querySelectorAll("#leaves-table tbody tr")].filter(
  (row) => row.checkVisibility()).map((row) => row.cells[arguments[0]].textContent)
"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 400])
def test_in_a_browser(browser, plan, tmp_path, width):
    plan.save(tmp_path / "plan.html")
    open_page(browser, tmp_path / "plan.html", width)
    search(browser, plan)
    sort(browser, plan)
    assert_fits_without_errors(browser)


def search(browser, plan):
    field = browser.find_element("id", "leaves-search")
    field.send_keys("MLP fsdp")
    wanted = {x.path for x in plan.leaves if "mlp" in x.path and "fsdp" in x.spec}
    assert wanted and {*browser.execute_script(TEXTS, 0)} == wanted
    count = browser.find_element("css selector", "#arrays output").text
    assert count == f"{len(wanted)} of {len(plan.leaves)} arrays"
    field.send_keys(8 * "\ue003")  # The key Backspace.
    assert len(browser.execute_script(TEXTS, 0)) == len(plan.leaves)


def sort(browser, plan):
    path, *_, optimizer, _ = browser.find_elements(
        "css selector", "#leaves-table th button"
    )
    head = optimizer.find_element("xpath", "..")
    optimizer.send_keys("\ue007")  # The key Enter.
    assert head.get_attribute("aria-sort") == "descending"
    order = {leaf.path: leaf.optimizer for leaf in plan.leaves}
    sizes = [order[path] for path in browser.execute_script(TEXTS, 0)]
    assert sizes == sorted(sizes, reverse=True) and len({*sizes}) > 2
    optimizer.click()
    assert head.get_attribute("aria-sort") == "ascending"
    sizes = [order[path] for path in browser.execute_script(TEXTS, 0)]
    assert sizes == sorted(sizes)
    path.click()
    assert browser.execute_script(TEXTS, 0) == sorted(order)
    assert head.get_attribute("aria-sort") == "none"
