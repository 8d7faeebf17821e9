import json
import math

import pytest
from page_parser import parse
from run_page_helpers import make_lines, make_run

from eqxshard.run._curves import MOST_POINTS, draw_curves, thin
from eqxshard.run._read_run import Point, read_run


def draw(tmp_path, **logs):
    """The page of some runs' curves, and the series of each chart by its title."""
    runs = {k: read_run(make_run(tmp_path / k, lines=lines)) for k, lines in logs.items()}
    page = parse(draw_curves(runs))
    charts = json.loads(page.find("script", id="curves-data").text)
    titles = [x.text for x in page.find_all("figcaption")]
    return page, dict(zip(titles, charts, strict=True))


def test_each_metric_has_a_chart_and_the_speed_is_last(tmp_path):
    lines = make_lines()
    lines[2]["train/loss"] = None
    page, found = draw(tmp_path, run=lines)
    assert [*found] == ["loss", "grad_norm", "accuracy", "examples per second"]
    train, test = found["loss"]
    assert (train["name"], test["name"]) == ("train", "eval")
    assert train["step"][:2] == [50, 100] and train["epoch"][:2] == [0.25, 0.5]
    assert train["seconds"][:2] == [18.0, 27.0] and train["value"][2] is None
    assert test["dotted"] and not train["dotted"] and len(test["value"]) == 10
    # The last values are there without a script, too.
    assert page.find("ul", class_="key").find("span", class_="value").text


def test_runs_are_drawn_over_each_other(tmp_path):
    _, found = draw(tmp_path, a=make_lines(4), b=make_lines(4))
    names = ["a, train", "a, eval", "b, train", "b, eval"]
    assert [x["name"] for x in found["loss"]] == names
    assert [x["run"] for x in found["loss"]] == [0, 0, 1, 1]
    assert [x["style"] for x in found["loss"]] == ["train c0", "c0", "train c1", "c1"]


@pytest.mark.parametrize("count", [10, MOST_POINTS, MOST_POINTS + 1, 5_432])
def test_long_curves_keep_their_ends_and_peaks(count):
    values = [math.sin(n / 50) for n in range(count)]
    values[count // 3], values[count // 2] = 99.0, math.nan
    points = [Point(n, math.nan, 0.0, value) for n, value in enumerate(values)]
    kept = thin(points)
    assert len(kept) <= MOST_POINTS
    assert kept[0].step == 0 and kept[-1].step == count - 1
    assert 99.0 in [point.value for point in kept]
    assert any(math.isnan(point.value) for point in kept)
    steps = [point.step for point in kept]
    assert steps == sorted(set(steps))
