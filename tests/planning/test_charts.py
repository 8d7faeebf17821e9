import dataclasses
import math

import pytest
from page_parser import parse

import eqxshard


def page_of(plan, path, **changes):
    dataclasses.replace(plan, **changes).save(path)
    return parse(path.read_text())


def picture(plan, tmp_path, mesh):
    devices = math.prod(mesh.values())
    page = page_of(plan, tmp_path / "plan.html", mesh=mesh, devices=devices)
    svg = page.find("svg", class_="mesh")
    return svg, [rect.find("title").text for rect in svg.find_all("rect")]


def test_a_small_mesh_is_drawn_whole(plan, tmp_path):
    svg, devices = picture(plan, tmp_path, {"data": 2, "fsdp": 4})
    assert svg.attributes["aria-label"] == "The mesh: data of 2, fsdp of 4"
    assert len(devices) == 8
    assert devices[0] == "device 0: data 0, fsdp 0; host 0"
    assert devices[-1] == "device 7: data 1, fsdp 3; host 0"
    labels = [
        text.text for text in svg.find_all("text") if not text.attributes.get("class")
    ]
    assert labels == ["fsdp = 4 →", "← data = 2"]


def test_a_large_mesh_is_abbreviated(plan, tmp_path):
    mesh = {"stage": 4, "data": 16, "fsdp": 32, "tensor": 8}
    svg, devices = picture(plan, tmp_path, mesh)
    # Of stage and data the first and the last, of fsdp seven and the last.
    assert len(devices) == 2 * 2 * 8 * 8
    last = "stage 3, data 15, fsdp 31, tensor 7; host 2,047"
    assert devices[-1] == f"device 16,383: {last}"
    places = [(x.attributes["x"], x.attributes["y"]) for x in svg.find_all("rect")]
    assert len(set(places)) == len(places)
    assert all(
        float(x) + 26 <= float(svg.attributes["viewbox"].split()[2]) for x, _ in places
    )


def bar_widths(section):
    spans = section.find("div", class_="bar").find_all("span")
    return {
        x.attributes["class"].split()[1]: float(x.attributes["style"].split(":")[1][:-1])
        for x in spans
        if x.attributes["class"].startswith("fill")
    }


def test_parts_of_a_bar_are_as_wide_as_their_share(plan, tmp_path):
    memory = dataclasses.replace(plan.memory, device=2 * plan.memory.peak)
    page = page_of(plan, tmp_path / "plan.html", memory=memory)
    widths = bar_widths(page.find("section", id="memory"))
    assert widths["temporaries"] == pytest.approx(
        50 * memory.temporaries / memory.peak, abs=0.01
    )
    assert widths["left"] == pytest.approx(50, abs=0.01)


def test_what_does_not_fit_has_a_mark_at_the_limit(plan, tmp_path):
    memory = dataclasses.replace(plan.memory, device=plan.memory.peak // 2)
    page = page_of(plan, tmp_path / "plan.html", memory=memory)
    section = page.find("section", id="memory")
    (limit,) = section.find_all("span", class_="limit")
    assert limit.attributes["style"] == "left:50.000%"
    assert "left" not in bar_widths(section)


#: A gather of 0.5 s, half of it hidden, and a loop of two iterations of 1 s.
TIMELINE = (
    eqxshard.PlannedSpan("collective", 0.0, 0.5, collective=0),
    eqxshard.PlannedSpan("compute", 0.0, 0.25),
    eqxshard.PlannedSpan("waiting", 0.25, 0.5, collective=0),
    eqxshard.PlannedSpan("loop", 0.5, 1.5, 2),
    eqxshard.PlannedSpan("memory", 0.5, 1.5, 2),
    eqxshard.PlannedSpan("compute", 1.5, 2.0),
)


def test_the_time_line_has_a_lane_for_the_device_and_for_each_link(plan, tmp_path):
    page = page_of(plan, tmp_path / "plan.html", timeline=TIMELINE)
    section = page.find("section", id="timeline")
    lanes = section.find_all("div", class_="lane")
    first = plan.collectives[0]
    assert [lane.find("div", class_="name").text for lane in lanes] == [
        "device",
        f"{','.join(first.axes)} links",
    ]
    device, links = ([x.attributes for x in lane.find_all("rect")] for lane in lanes)
    found = [(x["class"], float(x["x"]), float(x["width"])) for x in device]
    assert found == [
        *(("loop", 250, 500), ("compute", 0, 125), ("waiting", 125, 125)),
        *(("memory", 250, 500), ("compute", 750, 250)),
    ]
    assert [x["class"] for x in links] == ["loop", first.kind]
    said = lanes[1].find_all("title")[1].text
    assert said.startswith(f"{first.kind} over ") and said.endswith(": 0.5 s")
    (mark,) = section.find("div", class_="marks").find_all("span")
    assert mark.text == "loop 1 \u00d7 2"
    assert mark.attributes["style"] == "left:25.000%;width:50.000%"
    ticks = [x.text for x in section.find("div", class_="ticks").find_all("span")]
    assert ticks == ["0 s", "0.5 s", "1 s", "1.5 s"]
