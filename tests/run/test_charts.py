import math
import re

import pytest
from page_parser import parse
from run_page_helpers import make_lines, make_run

from eqxshard.run._charts import MOST_POINTS, draw_curves, thin
from eqxshard.run._recorded_run import Point, read_run


def draw(folder, lines):
    """The charts of a run by their titles."""
    page = parse(draw_curves(read_run(make_run(folder, lines=lines))))
    return {x.find("figcaption").text: x for x in page.find_all("figure")}


def curves(chart, kind="line"):
    """The points of each curve of a chart, in pieces where it has gaps."""
    paths = [x.attributes for x in chart.find_all("path")]
    return {
        path["class"].removeprefix(f"{kind} "): [
            [tuple(map(float, point.split())) for point in piece.split("L")]
            for piece in path["d"].replace("h0", "").split("M")[1:]
        ]
        for path in paths
        if path["class"].startswith(kind)
    }


def labels(chart, side):
    """The labels of a side and where they are, in parts of it."""
    spans = chart.find_all("span", class_=side)
    places = (re.search(r":([\d.]+)%", x.attributes["style"]) for x in spans)
    return {x.text: float(place[1]) / 100 for x, place in zip(spans, places) if place}


def test_each_metric_has_a_chart_and_the_speed_is_last(tmp_path):
    lines = make_lines()
    lines[2]["train/loss"] = None
    found = draw(tmp_path / "run", lines)
    assert [*found] == ["loss", "grad_norm", "accuracy", "examples per second"]
    loss = found["loss"]
    drawn = curves(loss)
    (test,) = drawn["eval c1"]
    # A value that is not finite is a gap.
    assert [len(piece) for piece in drawn["train c0"]] == [2, 37] and len(test) == 10
    assert [*curves(loss, "dots")] == ["eval c1"]
    name = loss.find("svg").attributes["aria-label"]
    assert re.fullmatch(r"loss: train 0\.\d{4}, eval 0\.\d{4}", name)
    key = [x.text for x in loss.find("ul", class_="key").find_all("li")]
    assert name == f"loss: {', '.join(key)}"


def test_points_are_where_the_labels_of_the_axes_say(tmp_path):
    lines = [{"step": n, "train/loss": 2.0 * n} for n in range(0, 1_001, 10)]
    chart = draw(tmp_path / "run", lines)["loss"]
    ((points),) = curves(chart)["train c0"]
    across, down = labels(chart, "x"), labels(chart, "y")
    assert [*across] == ["0", "200", "400", "600", "800", "1000"]
    assert [*down] == ["0", "500", "1000", "1500", "2000"]
    by_step = {n: point for n, point in zip(range(0, 1_001, 10), points)}
    for text, place in across.items():
        assert by_step[int(text)][0] == pytest.approx(1_000 * place, abs=0.1)
    for text, place in down.items():
        assert by_step[int(text) // 2][1] == pytest.approx(400 * place, abs=0.1)


@pytest.mark.parametrize(
    "values",
    [
        [0.0],
        [None, None],
        [5.0, 5.0],
        [0.0, 5e-324],
        [5e-324],
        [1e-310, -1e-310],
        [1e16, 1e16 + 2],
        [-1e308, 1e308],
        [1e308],
        [0.1, 0.1 + 1e-17, 0.1 + 2e-17],
    ],
)
def test_any_numbers_can_be_drawn(tmp_path, values):
    lines = [{"step": n + 1, "train/x": value} for n, value in enumerate(values)]
    chart = draw(tmp_path / "run", lines)["x"]
    for piece in curves(chart)["train c0"]:
        assert all(0 <= x <= 1_000 and 0 <= y <= 400 for x, y in piece)
    assert 2 <= len(labels(chart, "y")) <= 8


@pytest.mark.parametrize("count", [10, MOST_POINTS, MOST_POINTS + 1, 5_432])
def test_long_curves_keep_their_ends_and_peaks(count):
    values = [math.sin(n / 50) for n in range(count)]
    values[count // 3], values[count // 2] = 99.0, math.nan
    points = [Point(n, value) for n, value in enumerate(values)]
    kept = thin(points)
    assert len(kept) <= MOST_POINTS
    assert kept[0].step == 0 and kept[-1].step == count - 1
    assert 99.0 in [point.value for point in kept]
    assert any(math.isnan(point.value) for point in kept)
    steps = [point.step for point in kept]
    assert steps == sorted(set(steps))
