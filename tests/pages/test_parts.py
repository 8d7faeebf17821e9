import pytest
from page_parser import assert_loads_nothing, parse, rows

from eqxshard.pages._html import Markup, join, tag
from eqxshard.pages._parts import (
    card,
    draw_tiles,
    fill_page,
    number_cell,
    pair,
    plain_table,
    read_assets,
    settings_list,
    sortable_table,
)

CELLS = [tag("tr", tag("th", "a"), number_cell("1 kB", 1000))]


def make_page(**more):
    cards = join(card("one", "First & last", tag("p", "text")))
    head = {"title": "<t>", "about": "<a>", "headline": "<h>"}
    return parse(fill_page(**head, tiles=Markup(""), cards=cards, **more))


def test_a_page_has_a_frame_and_loads_nothing():
    page = make_page()
    assert_loads_nothing(page)
    assert page.find("title").text == "<t>" and page.find("h1").text == "<h>"
    section = page.find("section", id="one")
    assert section.find("h2").text == "First & last"
    assert section.attributes["aria-labelledby"] == section.find("h2").attributes["id"]


def test_a_page_may_have_style_and_script_of_its_own():
    page = make_page(style=".own {}", script="const own = 1")
    assert page.find("style").text.endswith(".own {}")
    assert page.find_all("script")[-1].text.endswith("const own = 1")


def test_the_assets_of_a_room_are_found():
    assert {*read_assets("eqxshard.pages")} == {"page.html", "page.css", "page.js"}
    assert {*read_assets("eqxshard.run")} == {"curves.css", "curves.js"}


@pytest.mark.parametrize("empty", [(), (Markup(""), Markup(""))])
def test_of_no_cards_there_is_no_pair(empty):
    assert pair(*empty) == ""


def test_tiles_and_settings_are_pairs_of_names_and_values():
    page = parse(
        join(draw_tiles({"Step": ("1 s", "<at least")}), settings_list({"a": "b"}))
    )
    tiles, settings = page.find_all("dl")
    assert [x.text for x in tiles if x.tag in ("dt", "dd")] == ["Step", "1 s<at least"]
    assert [x.text for x in settings if x.tag in ("dt", "dd")] == ["a", "b"]


def test_a_sortable_table_can_be_searched_and_says_its_order():
    columns = {"Name": False, "In all": True}
    page = parse(sortable_table("t", "Things", columns, CELLS, "things"))
    heads = page.find("thead").find_all("th")
    assert [x.attributes["aria-sort"] for x in heads] == ["none", "descending"]
    assert [x.attributes.get("class") for x in heads] == [None, "number"]
    assert page.find("output").text == "1 things"
    ((_, size),) = rows(page, "t")
    assert size.attributes["data-value"] == "1000"


def test_a_plain_table_has_no_buttons():
    page = parse(plain_table("Axes", ("Axis", "Size"), CELLS))
    assert [x.text for x in page.find_all("th", scope="col")] == ["Axis", "Size"]
    assert not page.find_all("button")
