import dataclasses

from page_parser import parse

import eqxshard

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
    dataclasses.replace(plan, timeline=TIMELINE).save(tmp_path / "plan.html")
    page = parse((tmp_path / "plan.html").read_text())
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
