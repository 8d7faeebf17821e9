"""Reads a page of HTML as a tree."""

import re
from html.parser import HTMLParser

LOADING = ("src", "href", "action", "data", "srcset", "poster")
VOID = {"meta", "link"}


class Element:
    def __init__(self, tag, attributes):
        self.tag, self.attributes, self.children = tag, attributes, []

    def __iter__(self):
        for child in self.children:
            if isinstance(child, Element):
                yield child
                yield from child

    def find(self, tag, **attributes):
        return self.find_all(tag, **attributes)[0]

    def find_all(self, tag, **attributes):
        wanted = {k.strip("_").replace("_", "-"): v for k, v in attributes.items()}
        return [x for x in self if x.tag == tag and wanted.items() <= x.attributes.items()]

    @property
    def text(self):
        parts = (x.text if isinstance(x, Element) else x for x in self.children)
        return "".join(parts)


class Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open = [Element("page", {})]

    def handle_starttag(self, tag, attrs):
        element = Element(tag, dict(attrs))
        self.open[-1].children.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag):
        assert self.open[-1].tag == tag, f"{tag} ends in {self.open[-1].tag}"
        self.open.pop()

    def handle_data(self, data):
        self.open[-1].children.append(data)


def parse(text):
    """The root of a page, all of whose elements end where they must."""
    reader = Reader()
    reader.feed(text)
    reader.close()
    (page,) = reader.open
    return page


def rows(page, name):
    """The rows of the table in a section, as the elements of their cells."""
    body = page.find("section", id=name).find("tbody")
    return [
        [x for x in row.children if x.tag in ("td", "th")] for row in body.find_all("tr")
    ]


def assert_loads_nothing(page):
    """Nothing on a page asks for anything from elsewhere, and there are no scripts."""
    assert not page.find_all("script")
    for element in page:
        for name in LOADING:
            assert element.attributes.get(name, "data:,") == "data:,"
    text = "".join(x.text for x in page.find_all("style"))
    assert not re.search(r"https?:|url\(|@import", text)
    policy = page.find("meta", http_equiv="Content-Security-Policy").attributes["content"]
    assert policy.startswith("default-src 'none'; ")


def assert_accessible(page):
    """Headings are in order, and everything that needs a name has one."""
    levels = [x.tag for x in page if re.fullmatch(r"h\d", x.tag)]
    assert levels == ["h1"] + ["h2"] * (len(levels) - 1)
    assert page.find("html").attributes["lang"] == "en"
    assert all("caption" in [x.tag for x in table] for table in page.find_all("table"))
    named = [x.attributes for x in page.find_all("div") if "tabindex" in x.attributes]
    assert all(each["tabindex"] == "0" and each["aria-label"] for each in named)
    ids = [x.attributes["id"] for x in page if "id" in x.attributes]
    assert len(ids) == len({*ids})
