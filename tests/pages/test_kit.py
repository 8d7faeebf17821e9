"""The parts of pages: markup, tables, bars, the picture of a mesh."""

from page_parser import assert_accessible, assert_loads_nothing, parse, rows

from eqxshard.pages._kit import (
    Markup,
    Number,
    Part,
    card,
    draw_bar,
    draw_legend,
    draw_tiles,
    fill_page,
    join,
    pair,
    settings_list,
    sortable_table,
    tag,
)
from eqxshard.pages._mesh import draw_mesh

PARTS = [Part("a", "weights", 60, "60 B"), Part("b", "left <", 40, "40 B")]
CELLS = [["a <", Number("1 kB", 1000), tag("code", "b")]]


def test_what_is_not_markup_is_escaped():
    assert tag("p", "<b>", tag("b", "a & b")) == "<p>&lt;b&gt;<b>a &amp; b</b></p>"
    assert join("</script>", Markup("<i></i>")) == "&lt;/script&gt;<i></i>"
    element = tag("input", class_="a", data_value=0, title='"', hidden=True, id=None)
    assert element == '<input class="a" data-value="0" title="&quot;" hidden>'


def test_a_page_has_a_frame_and_loads_nothing():
    table = sortable_table("things", ("Name", "In all", "Note"), CELLS, "In all")
    page = parse(
        fill_page(
            title="<t>",
            about="<a>",
            headline="<h>",
            tiles=draw_tiles({"Step": ("1 s", "<at least")}),
            cards=[
                card("one", "First & last", settings_list({"a": "b"})),
                pair(card("two", "Table", table), Markup("")),
                pair(Markup("")),
            ],
        )
    )
    assert_loads_nothing(page)
    assert_accessible(page)
    assert page.find("title").text == "<t>" and page.find("h1").text == "<h>"
    section = page.find("section", id="one")
    assert section.find("h2").text == "First & last"
    assert section.attributes["aria-labelledby"] == section.find("h2").attributes["id"]
    tiles, settings = page.find_all("dl")
    assert [x.text for x in tiles if x.tag in ("dt", "dd")] == ["Step", "1 s<at least"]
    assert [x.text for x in settings if x.tag in ("dt", "dd")] == ["a", "b"]
    heads = page.find("thead").find_all("th")
    assert [x.attributes["aria-sort"] for x in heads] == ["none", "descending", "none"]
    assert [x.attributes.get("class") for x in heads] == [None, "number", None]
    assert page.find("output").text == "1 things"
    ((name, size, note),) = rows(page, "things")
    assert (name.tag, name.text, note.find("code").text) == ("th", "a <", "b")
    assert (size.text, size.attributes["data-value"]) == ("1 kB", "1000")


def test_bars_and_legends_have_sizes_and_shares():
    crumb = Part("c", "crumb", 0.1, "0.1 B")
    page = parse(draw_bar([*PARTS, crumb], 200, limit=50))
    styles = {x.attributes["class"]: x.attributes["style"] for x in page.find_all("span")}
    # What would not be seen is not drawn.
    assert styles == {
        "fill a": "width:30.000%",
        "fill b": "width:20.000%",
        "limit": "left:25.000%",
    }
    label = page.find("div").attributes["aria-label"]
    assert label == "weights 60 B, left < 40 B, crumb 0.1 B"
    body = parse(draw_legend(PARTS, 200, "Bytes")).find("tbody")
    cells = [[x.text for x in row.children] for row in body.find_all("tr")]
    assert cells == [["weights", "60 B", "30.0%"], ["left <", "40 B", "20.0%"]]


def draw(mesh):
    """The picture, and the devices in it in words; eight are on each host."""
    svg = parse(draw_mesh(mesh, 8)).find("svg", class_="mesh")
    return svg, [rect.find("title").text for rect in svg.find_all("rect")]


def test_a_small_mesh_is_drawn_whole_and_hosts_differ_in_shade():
    svg, devices = draw({"data": 3, "fsdp": 8})
    assert svg.attributes["aria-label"] == "The mesh: data of 3, fsdp of 8"
    assert len(devices) == 24
    assert devices[0] == "device 0: data 0, fsdp 0; host 0"
    assert devices[-1] == "device 23: data 2, fsdp 7; host 2"
    labels = [x.text for x in svg.find_all("text") if not x.attributes.get("class")]
    assert labels == ["fsdp = 8 →", "← data = 3"]
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
    width = float(svg.attributes["viewbox"].split()[2])
    assert all(float(x) + 26 <= width for x, _ in places)
