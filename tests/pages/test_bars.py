from page_parser import parse

from eqxshard.pages._bars import Part, draw_bar, draw_bars, draw_legend

PARTS = [Part("a", "weights", 60, "60 B"), Part("b", "left <", 40, "40 B")]


def styles(page):
    return {x.attributes["class"]: x.attributes["style"] for x in page.find_all("span")}


def test_parts_are_as_wide_as_their_share():
    page = parse(draw_bar(PARTS, 200))
    assert styles(page) == {"fill a": "width:30.000%", "fill b": "width:20.000%"}
    assert page.find("div").attributes["aria-label"] == "weights 60 B, left < 40 B"


def test_what_would_not_be_seen_is_not_drawn():
    page = parse(draw_bar([*PARTS, Part("c", "crumb", 0.1, "0.1 B")], 100))
    assert [*styles(page)] == ["fill a", "fill b"]


def test_a_limit_has_a_mark():
    assert styles(parse(draw_bar(PARTS, 100, limit=50)))["limit"] == "left:50.000%"


def test_a_legend_has_sizes_and_shares():
    body = parse(draw_legend(PARTS, 200, "Bytes")).find("tbody")
    cells = [[x.text for x in row.children] for row in body.find_all("tr")]
    assert cells == [["weights", "60 B", "30.0%"], ["left <", "40 B", "20.0%"]]
    assert parse(draw_legend(PARTS, 0, "Bytes")).find("td", class_="share").text == ""


def test_each_part_has_a_bar_of_its_own():
    rows = parse(draw_bars(PARTS, 60, "Bytes")).find("tbody").find_all("tr")
    widths = [row.find("span").attributes["style"] for row in rows]
    assert widths == ["width:100.000%", "width:66.667%"]
