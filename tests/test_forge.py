"""The README and the pages read well on a forge, which renders plain Markdown only.

Links lead to files and headings that are there, pictures are files, code fits its column,
and what only the site understands stays out.
"""

import re

import pytest
from test_readme import PAGES, blocks, each

#: The pages of the API are lists of names for the site.
TEXTS = [page for page in PAGES if page.parent.name != "api" or page.name == "index.md"]
#: The widest code that neither a forge nor the site makes readers scroll.
WIDEST = 88
_FENCE = re.compile(r"^( *)```.*?^\1```$", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"`[^`]*`")
_LINK = re.compile(r"\]\(([^)\s]+)\)|(?:href|src)=\"([^\"]+)\"")


def headings(page):
    """The anchors of a page: those of a forge and, of the API, those of the site."""
    text = _FENCE.sub("", page.read_text())
    for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
    yield from re.findall(r"^::: (\S+)", text, re.MULTILINE)


def find_problems(page):
    """The problems that a reader on a forge would have."""
    text = _FENCE.sub("", page.read_text())
    for match in _LINK.finditer(text):
        target, _, anchor = (match[1] or match[2]).partition("#")
        if re.match(r"\w+:", target):
            continue
        file = (page.parent / target).resolve() if target else page
        if not file.is_file():
            yield f"{target} is not a file"
        elif anchor and not anchor.startswith(tuple(headings(file))):
            yield f"{target} has no heading #{anchor}"
    text = _CODE.sub("`code`", text)
    for match in re.finditer(r"\]\[[^\]]*\]", text):
        yield f"{match[0]} is a link of the site alone"
    for line in re.findall(r"^(?:!!!|\?\?\?|===|:::|---$).*|.*\{:? ?[.#]\w.*", text, re.M):
        yield f"{line} is raw text"


@each("page", TEXTS)
def test_a_page_reads_well_without_the_site(page):
    assert [*find_problems(page)] == []


@each("page", PAGES)
def test_code_fits_its_column(page):
    shown = blocks(page, "python", "bash", "text")
    lines = [line for block in shown for line in block.text.splitlines()]
    assert [line for line in lines if len(line) > WIDEST] == []


@pytest.mark.parametrize(
    "text",
    [
        "[a](nowhere.md)",
        "[a](README.md#no-such-heading)",
        "[`eqxshard.fit`][]",
        "[fit][eqxshard.fit]",
        "!!! note",
        "::: eqxshard.fit",
        "[a](README.md){ .md-button }",
    ],
)
def test_what_a_forge_shows_as_raw_text_is_found(text, tmp_path):
    (tmp_path / "README.md").write_text("# A title\n[here](#a-title) `x[0][1]`\n")
    assert [*find_problems(tmp_path / "README.md")] == []
    (tmp_path / "page.md").write_text(f"{text}\n")
    assert [*find_problems(tmp_path / "page.md")] != []
