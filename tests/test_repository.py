"""What GitHub reads: how to cite, contribute and report."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
GITHUB = ROOT / ".github"
FORMS = sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml"))
#: What the schema of version 1.2.0 requires.
REQUIRED = {"cff-version", "message", "title", "authors"}


def test_the_citation_can_be_read():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation.keys() >= REQUIRED
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software"
    project = (ROOT / "pyproject.toml").read_text()
    assert f'license = "{citation["license"]}"' in project


@pytest.mark.parametrize("form", [x for x in FORMS if x.stem != "config"], ids=str)
def test_the_forms_of_issues_can_be_read(form):
    found = yaml.safe_load(form.read_text())
    assert found["name"] and found["description"]
    assert all(each["attributes"]["label"] for each in found["body"])
    assert any(each.get("validations", {}).get("required") for each in found["body"])


@pytest.mark.parametrize("page", sorted(GITHUB.rglob("*.md")), ids=lambda page: page.name)
def test_links_and_files_of_a_page_exist(page):
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / link).exists(), link
    for name in re.findall(r"`((?:docs|tests|eqxshard|\.ci)/[\w./]+)`", text):
        assert (ROOT / name).exists(), name
