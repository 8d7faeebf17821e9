"""The parts of pages: markup, tables, bars."""

from page_parser import assert_accessible, assert_loads_nothing, parse, rows

from eqxshard.pages._kit import (
    Markup,
    Number,
    Part,
    card,
    draw_bar,
    draw_legend,
    draw_table,
    draw_tiles,
    fill_page,
    join,
    pair,
    settings_list,
    tag,
)

PARTS = [Part("a", "weights", 60, "60 B"), Part("b", "left <", 40, "40 B")]
CELLS = [["a <", Number("1 kB"), tag("code", "b")]]


def test_what_is_not_markup_is_escaped():
    assert tag("p", "<b>", tag("b", "a & b")) == "<p>&lt;b&gt;<b>a &amp; b</b></p>"
    assert join("</script>", Markup("<i></i>")) == "&lt;/script&gt;<i></i>"
    element = tag("i", class_="a", data_value=0, title='"', id=None)
    assert element == '<i class="a" data-value="0" title="&quot;"></i>'


def test_a_page_has_a_frame_and_loads_nothing():
    table = draw_table("things", ("Name", "In all", "Note"), CELLS)
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
    assert [x.attributes.get("class") for x in heads] == [None, "number", None]
    ((name, size, note),) = rows(page, "two")
    assert (name.tag, name.text, note.find("code").text) == ("th", "a <", "b")
    assert (size.text, size.attributes["class"]) == ("1 kB", "number")


def test_bars_and_legends_have_sizes_and_shares():
    crumb = Part("c", "crumb", 0.1, "0.1 B")
    page = parse(draw_bar([*PARTS, crumb], 200, limit=50))
    styles = {x.attributes["class"]: x.attributes["style"] for x in page.find_all("span")}
    # A part that is too small to see is not drawn.
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
