import pytest
from browser import assert_fits_without_errors, browser, open_page
from page_parser import parse, rows
from run_page_helpers import make_lines, make_record, make_run

from eqxshard.run._compare_page import compare_runs

_ = browser  # A fixture.


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("compare")
    settings = {"learning_rate": 0.01, "seed": 0, "output": "elsewhere"}
    make_run(path / "slow", record=make_record(best="eval/loss", mode="max"))
    make_run(path / "fast", lines=make_lines(20), record=make_record(settings=settings))
    compare_runs([str(path / "slow"), str(path / "fast")], str(path / "compare.html"))
    return path / "compare.html"


@pytest.fixture(scope="module")
def page(file):
    return parse(file.read_text(encoding="utf-8"))


def test_results_are_side_by_side(page):
    assert page.find("h1").text == "2 runs compared"
    slow, fast = ([x.text for x in cells] for cells in rows(page, "runs"))
    # The last values, and the best of the metric whose best checkpoint one of them keeps.
    best = max(line.get("eval/loss", 0) for line in make_lines())
    assert slow[:6] == ["slow", "finished", "2,000", "0.3176", "0.9155", f"{best:#.4g}"]
    assert (fast[:3], fast[5]) == (["fast", "stopped", "1,000"], "")


def test_only_what_differs_is_listed(page):
    body = page.find("section", id="settings").find("tbody")
    found = [[x.text for x in row if x.tag in ("th", "td")] for row in body.find_all("tr")]
    assert found == [["batch_size", "64", ""], ["learning_rate", "0.001", "0.01"]]


def test_the_devices_of_a_run_are_those_that_it_had(tmp_path):
    """The options may be the same, and name none: the mesh is of what there was."""
    for name, count in {"a": 8, "b": 4}.items():
        settings = {"mesh": "fsdp=-1", "devices": None}
        devices = {"kind": "cpu", "count": count, "per_process": count}
        record = make_record(settings=settings, mesh={"fsdp": count}, devices=devices)
        make_run(tmp_path / name, record=record)
    compare_runs([str(tmp_path / "a"), str(tmp_path / "b")], str(tmp_path / "c.html"))
    section = parse((tmp_path / "c.html").read_text()).find("section", id="settings")
    body = section.find("tbody").find_all("tr")
    found = [[x.text for x in row if x.tag in ("th", "td")] for row in body]
    assert found == [
        ["mesh", "fsdp=8", "fsdp=4"],
        ["devices", "8 x cpu", "4 x cpu"],
    ]


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 400])
def test_runs_are_hidden_in_a_browser(browser, file, width):
    lines = "return document.querySelector('.chart').querySelectorAll('.line').length"
    open_page(browser, file, width)
    assert browser.execute_script(lines) == 4
    browser.find_element("css selector", "input[data-run='0']").send_keys(" ")
    assert browser.execute_script(lines) == 2
    assert_fits_without_errors(browser)
