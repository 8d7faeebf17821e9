"""What GitHub reads: how to cite, contribute and report."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
GITHUB = ROOT / ".github"
FORMS = sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml"))
#: What the schema of version 1.2.0 requires, and what it allows of what one might write.
REQUIRED = {"cff-version", "message", "title", "authors"}
ALLOWED = REQUIRED | {"type", "abstract", "version", "date-released", "license", "keywords"}
ALLOWED |= {"doi", "url", "repository-code", "identifiers"}


def test_the_citation_can_be_read():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation.keys() >= REQUIRED and citation.keys() <= ALLOWED
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software"
    assert all(isinstance(value, str) and value for value in citation["keywords"])
    for author in citation["authors"]:
        assert author.keys() >= {"name"} or author.keys() >= {"family-names", "given-names"}
    project = (ROOT / "pyproject.toml").read_text()
    assert f'license = "{citation["license"]}"' in project


@pytest.mark.parametrize("form", [x for x in FORMS if x.stem != "config"], ids=str)
def test_the_forms_of_issues_can_be_read(form):
    found = yaml.safe_load(form.read_text())
    assert found["name"] and found["description"]
    names = [each["id"] for each in found["body"]]
    assert len(names) == len({*names})
    for each in found["body"]:
        assert each["type"] == "textarea" and each["attributes"]["label"]
    assert any(each.get("validations", {}).get("required") for each in found["body"])


def test_there_are_three_and_bugs_ask_for_the_doctor():
    assert [form.stem for form in FORMS] == ["bug", "config", "feature", "question"]
    body = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE" / "bug.yml").read_text())["body"]
    (doctor,) = [each for each in body if each["id"] == "doctor"]
    assert "`python -m eqxshard doctor`" in doctor["attributes"]["label"]
    assert doctor["validations"]["required"]


@pytest.mark.parametrize("page", sorted(GITHUB.rglob("*.md")), ids=lambda page: page.name)
def test_links_and_files_of_a_page_exist(page):
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / link).exists(), link
    for name in re.findall(r"`((?:docs|tests|eqxshard|\.ci)/[\w./]+)`", text):
        assert (ROOT / name).exists(), name
