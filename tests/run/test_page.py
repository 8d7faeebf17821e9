import dataclasses
import json
import os

import pytest
from browser import browser, open_page
from page_parser import assert_accessible, assert_loads_nothing, parse, rows
from run_page_helpers import make_lines, make_plan, make_record, make_run

from eqxshard.planning import Plan, PlannedMemory, PlannedTime
from eqxshard.run._page import save_page

_ = browser  # A fixture.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "lenet"
    lines = make_lines()
    lines[3]["train/loss"] = None
    return make_run(
        path,
        lines=lines,
        record=make_record(),
        warnings=["a table is left whole."],
        plan=make_plan(),
    )


def page_of(folder):
    save_page(folder)
    return parse(folder.page.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def page(folder):
    return page_of(folder)


def cards(page):
    return [x.attributes["id"] for x in page.find_all("section")]


def tiles(page):
    boxes = page.find("dl", class_="tiles").find_all("div")
    return {x.find("dt").text: x.find("dd").text for x in boxes}


def test_everything_of_a_run_is_there(page):
    wanted = ["warnings", "curves", "ledger", "plan", "metrics", "evaluations", "mesh"]
    assert cards(page) == [*wanted, "settings", "versions"]
    assert page.find("h1").text == "Finished after 2,000 steps"
    found = tiles(page)
    assert found["Test accuracy"].startswith("0.9155")
    assert found["Step"].startswith("0.13 s")
    assert found["Images per second"].startswith("492")
    assert found["Memory of a device"].startswith("61.00 GB")
    assert page.find("section", id="warnings").find("li").text == (
        "eqxshard: a table is left whole."
    )
    assert "python" in [x.text for x in page.find("section", id="versions").find_all("dt")]


def test_times_are_in_the_zone_of_the_first_start(tmp_path):
    starts = [
        {"time": "2026-03-01T10:00:00+09:00", "step": 0},
        {"time": "2026-03-01T01:20:00+00:00", "step": 1000},
    ]
    ended = {"time": "2026-03-01T03:00:00+01:00", "why": ""}
    folder = make_run(tmp_path / "a", record=make_record(starts=starts, ended=ended))
    about = page_of(folder).find("p", class_="about").text
    said = "started 2026-03-01 10:00, resumed at step 1,000, ended 2026-03-01 11:00"
    assert about.endswith(f" | {said} UTC+09:00")
    times = [cells[0].text for cells in rows(page_of(folder), "starts")]
    assert times == ["2026-03-01 10:00", "2026-03-01 10:20"]
    # The clock of this machine is in another zone.
    os.utime(folder.metrics, (1772330000, 1772330000))
    folder.record.write_text(json.dumps(make_record(starts=starts, steps=3000, ended=None)))
    headline = page_of(folder).find("h1").text
    assert headline.endswith("on 2026-03-01 10:53 UTC+09:00, and not ended since")


def test_a_page_may_be_attached_to_an_issue(page, folder):
    """It names no host and no folder, and has no command line, which may have a secret."""
    record = json.loads(folder.record.read_text())
    text = folder.page.read_text()
    assert record["host"] == "node-3" and "node-3" not in text
    assert record["command"] not in text and "train.py" not in text
    assert record["settings"]["output"] not in text
    assert "Linux-6.1" in page.find("section", id="versions").text


def test_metrics_have_their_ends_and_what_is_missing(page):
    found = {cells[0].text: [x.text for x in cells[1:]] for cells in rows(page, "metrics")}
    first, last, low, low_at, high, high_at, missing = found["eval/accuracy"]
    assert (first, low, low_at) == ("0.4991", "0.4991", "200")
    assert (last, high, high_at, missing) == ("0.9155", "0.9155", "2,000", "")
    assert found["train/loss"][-1] == "1"
    assert len(rows(page, "evaluations")) == 10


def plan_rows(page):
    body = page.find("section", id="plan").find("tbody")
    found = [[x.text for x in row if x.tag in ("th", "td")] for row in body.find_all("tr")]
    return {name: cells for name, *cells in found}


def test_a_plan_is_beside_what_was_measured(page):
    assert plan_rows(page) == {
        "devices": ["8 x NVIDIA H200", "8 x NVIDIA H200", ""],
        "mesh": ["data=2, fsdp=4", "data=2, fsdp=4", ""],
        "batch size": ["64", "64", ""],
        "time of a step": ["0.1 s", "0.13 s", "1.3"],
        "examples per second": ["640", "492", "0.769"],
        "of the devices' peak": ["80.0%", "61.5%", "0.769"],
        "memory of a device": ["58.00 GB", "61.00 GB", "1.05"],
    }


def test_the_plan_of_this_version_is_understood():
    """The page reads what a plan writes."""
    names = {field.name for field in dataclasses.fields(Plan)}
    names |= {"examples_per_second", "mfu"}
    assert make_plan().keys() <= names
    assert {"peak"} <= {x.name for x in dataclasses.fields(PlannedMemory)}
    assert {"step"} <= {x.name for x in dataclasses.fields(PlannedTime)}


def test_a_run_by_hand_has_only_its_log(tmp_path):
    found = page_of(make_run(tmp_path / "mine"))
    assert found.find("h1").text.startswith("At step 2,000 on ")
    assert cards(found) == ["curves", "ledger", "metrics", "evaluations"]


def test_everything_is_escaped(tmp_path):
    bad = "</script><b>&\"'"
    lines = make_lines(4)
    for line in lines:
        line[f"train/{bad}"] = 1.0
    record = make_record(
        title=bad,
        unit=bad,
        mesh={bad: 8},
        command=bad,
        settings={bad: bad},
        versions={bad: bad},
        system=bad,
        devices={"kind": bad, "count": 8, "per_process": 8},
        ended={"time": "2026-03-01T10:06:00+00:00", "why": bad},
    )
    folder = make_run(tmp_path / "bad", lines=lines, record=record, warnings=[bad])
    found = page_of(folder)
    text = folder.page.read_text()
    assert "</script>" not in text and "<b>" not in text
    assert found.find("title").text == bad
    assert bad in [x.text for x in found.find_all("figcaption")]


def test_it_loads_nothing_and_is_small(page, folder):
    assert_loads_nothing(page)
    assert folder.page.stat().st_size < 100_000


def test_it_can_be_read_by_ear_and_used_by_keyboard(page):
    assert_accessible(page)
    assert all(x.attributes["aria-label"] for x in page.find_all("svg"))


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 400])
def test_it_fits_windows(browser, page, folder, width):
    open_page(browser, folder.page, width)
