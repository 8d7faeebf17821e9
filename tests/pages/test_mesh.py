from page_parser import parse

from eqxshard.pages._mesh import draw_mesh


def draw(mesh):
    """The picture, and the devices in it in words; eight are on each host."""
    svg = parse(draw_mesh(mesh, 8)).find("svg", class_="mesh")
    return svg, [rect.find("title").text for rect in svg.find_all("rect")]


def test_a_small_mesh_is_drawn_whole():
    svg, devices = draw({"data": 2, "fsdp": 4})
    assert svg.attributes["aria-label"] == "The mesh: data of 2, fsdp of 4"
    assert len(devices) == 8
    assert devices[0] == "device 0: data 0, fsdp 0; host 0"
    assert devices[-1] == "device 7: data 1, fsdp 3; host 0"
    labels = [
        text.text for text in svg.find_all("text") if not text.attributes.get("class")
    ]
    assert labels == ["fsdp = 4 →", "← data = 2"]


def test_hosts_differ_in_shade():
    svg, _ = draw({"data": 3, "fsdp": 8})
    shades = [rect.attributes["class"] for rect in svg.find_all("rect")]
    assert shades == 8 * ["even"] + 8 * ["odd"] + 8 * ["even"]


def test_a_large_mesh_is_abbreviated():
    svg, devices = draw({"stage": 4, "data": 16, "fsdp": 32, "tensor": 8})
    # Of stage and data the first and the last, of fsdp seven and the last.
    assert len(devices) == 2 * 2 * 8 * 8
    last = "stage 3, data 15, fsdp 31, tensor 7; host 2,047"
    assert devices[-1] == f"device 16,383: {last}"
    places = [(x.attributes["x"], x.attributes["y"]) for x in svg.find_all("rect")]
    assert len(set(places)) == len(places)
    assert all(
        float(x) + 26 <= float(svg.attributes["viewbox"].split()[2]) for x, _ in places
    )
