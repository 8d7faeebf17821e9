"""The parts of a release: the sdist, and the wheel built from it (`nox -s release`)."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import pytest
import yaml

import eqxshard

ROOT = Path(__file__).parent.parent
VERSION = eqxshard.__version__
#: Files that Hatchling adds to an sdist.
ADDED = {"PKG-INFO", ".gitignore"}
#: At the top level of the checkout, but not needed to build or test a release.
LEFT_OUT = {".ci", ".github"}
#: Files that the pages are made with.
FOR_PAGES = {".github/CONTRIBUTING.md"}


def git(*words):
    command = ["git", "-C", str(ROOT), *words]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def source_files():
    """The files in git: anything else in a release was left there by accident."""
    return set(git("ls-files"))


class Built(NamedTuple):
    sdist: Path
    wheel: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Both files, in $EQXSHARD_DIST where it is set."""
    folder = Path(os.environ.get("EQXSHARD_DIST") or tmp_path_factory.mktemp("dist"))
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT]
    subprocess.run(command, check=True, capture_output=True)
    name = f"eqxshard-{VERSION}"
    return Built(folder / f"{name}.tar.gz", folder / f"{name}-py3-none-any.whl")


@pytest.mark.release
def test_the_sdist_has_what_git_has(built):
    with tarfile.open(built.sdist) as archive:
        paths = [PurePosixPath(file.name) for file in archive if file.isfile()]
    found = {str(path.relative_to(f"eqxshard-{VERSION}")) for path in paths}
    wanted = {x for x in source_files() if PurePosixPath(x).parts[0] not in LEFT_OUT}
    assert found == wanted | FOR_PAGES | ADDED


@pytest.mark.release
def test_the_wheel_has_the_package_and_nothing_else(built):
    with zipfile.ZipFile(built.wheel) as archive:
        names = set(archive.namelist())
        licence = archive.read(f"eqxshard-{VERSION}.dist-info/licenses/LICENSE")
    info = {name for name in names if name.startswith(f"eqxshard-{VERSION}.dist-info/")}
    assert names - info == {x for x in source_files() if x.startswith("eqxshard/")}
    assert {"eqxshard/py.typed", "eqxshard/__init__.pyi"} <= names
    assert {"eqxshard/pages/page/page.css", "eqxshard/pages/page/page.html"} <= names
    assert licence == (ROOT / "LICENSE").read_bytes()


@pytest.mark.release
def test_the_metadata_are_as_pypi_wants_them(built):
    command = [sys.executable, "-m", "twine", "check", "--strict", *built]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("PASSED") == 2, done.stdout


@pytest.mark.release
def test_the_wheel_works_alone(built, tmp_path):
    """The environment has only the wheel and its requirements."""
    environment = tmp_path / "environment"
    python = environment / "bin" / "python"
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "-q", "-p", sys.executable, environment], check=True)
    install = [*uv, "pip", "install", "-q", "--python", python, built.wheel]
    subprocess.run(install, check=True)
    script = (ROOT / "tests" / "release_smoke.py").read_text()
    # -I: neither the checkout nor the settings of these tests.
    command = [python, "-I", "-c", script, VERSION, environment]
    alone = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    done = subprocess.run(command, cwd=tmp_path, env=alone, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "trained\n"


def headings():
    """The versions on the page of changes, the newest first."""
    page = (ROOT / "docs" / "pages" / "changes.md").read_text()
    return re.findall(r"^## (\S+)(?: \((\d{4}-\d\d-\d\d)\))?$", page, re.MULTILINE)


def tags():
    """The tags of this commit, in a checkout."""
    return git("tag", "--points-at", "HEAD") if (ROOT / ".git").exists() else []


def test_what_says_the_version_says_the_same():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == VERSION
    newest, day = headings()[0]
    released = [tag for tag in tags() if re.match(r"v\d", tag)]
    if not released and newest == "Unreleased":
        return
    assert newest == VERSION and day == str(citation["date-released"])
    assert released in ([], [f"v{VERSION}"])
