from page_parser import parse

from eqxshard.sharding._html import html_table


def test_a_table_has_its_cells_and_nothing_of_them_is_markup():
    page = parse(html_table(["array", "spec"], [("<b>w", "P('fsdp') & more"), ("x", "")]))
    assert [x.text for x in page.find("thead").find_all("th")] == ["array", "spec"]
    rows = [[y.text for y in x.children] for x in page.find("tbody").find_all("tr")]
    assert rows == [["<b>w", "P('fsdp') & more"], ["x", ""]]
    assert not page.find_all("b") and len(page.find_all("th", scope="row")) == 2


def test_a_table_may_have_no_head():
    page = parse(html_table([], [("a", "b")]))
    assert not page.find_all("thead") and page.find("td").text == "b"
