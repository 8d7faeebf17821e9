"""What the README and the guide show runs as it is shown.

The Python blocks of a page are one program, in order. The commands are run shortened:
with the flags of `SHORT` added. A block under `<!-- not run -->` is only read.
"""

import ast
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

import eqxshard

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

#: What makes a recipe take seconds: (its flags, in which `{}` is a folder to write to).
SHORT = {
    "recipes/fashion_mnist.py": "--model mlp --epochs 1 --data synthetic --output {}",
}

_BLOCK = re.compile(
    r"(?P<off><!-- not run -->\s*)?^(?P<indent> *)```(?P<language>\w+)[^\n]*\n"
    r"(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    page: Path
    language: str
    line: int  # of its first line of text
    text: str
    runs: bool


def blocks(page, *languages):
    text = page.read_text()
    for match in _BLOCK.finditer(text):
        if match["language"] in languages:
            line = text.count("\n", 0, match.start("text")) + 1
            code = textwrap.dedent(match["text"])
            yield Block(page, match["language"], line, code, match["off"] is None)


def program(page, *, runs_only):
    """The Python of a page, each line at the line where the page has it."""
    lines: list[str] = []
    for block in blocks(page, "python"):
        if block.runs or not runs_only:
            lines += [""] * (block.line - 1 - len(lines)) + block.text.splitlines()
    return "\n".join(lines)


def commands():
    """The shell commands of all pages, as (page:line, words)."""
    for page in PAGES:
        for block in blocks(page, "bash", "sh", "console"):
            whole = block.text.replace("\\\n", " ")
            for offset, line in enumerate(whole.splitlines()):
                for part in line.removeprefix("$ ").split("&&"):
                    words = shlex.split(part, comments=True)
                    if words:
                        yield f"{page.name}:{block.line + offset}", words


COMMANDS = list(commands())


def per_page(pages):
    return pytest.mark.parametrize(
        "page", pages, ids=lambda page: str(page.relative_to(ROOT))
    )


def check_names(code):
    """Refuse a dotted name of ours that leads to nothing."""
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Attribute):
            continue
        # Not the attributes of what a call returns: only names and dots.
        name = ast.unparse(node)
        if re.fullmatch(r"eqxshard(\.\w+)+", name):
            target = eqxshard
            for part in name.split(".")[1:]:
                assert hasattr(target, part), f"line {node.lineno}: {name}"
                target = getattr(target, part)


@per_page(PAGES)
def test_the_names_that_a_page_uses_are_ours(page):
    check_names(program(page, runs_only=False))


def test_a_misspelt_name_is_noticed():
    check_names("eqxshard.Metrics.stack(history).compute()")
    with pytest.raises(AssertionError, match=r"line 1: eqxshard\.Metrics\.stak"):
        check_names("eqxshard.Metrics.stak(history).compute()")


@pytest.mark.slow
@per_page([page for page in PAGES if program(page, runs_only=True)])
def test_the_python_of_a_page_runs(page, tmp_path):
    code = f"exec(compile({program(page, runs_only=True)!r}, {str(page)!r}, 'exec'))"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    # As on a reader's machine, where lock files are written.
    environment.pop("CI", None)
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr


def sessions():
    """The names of the functions that noxfile.py marks as sessions."""
    for node in ast.parse((ROOT / "noxfile.py").read_text()).body:
        if isinstance(node, ast.FunctionDef):
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            if any(decorator.startswith("nox.session") for decorator in decorators):
                yield node.name


def check_command(words):
    """Refuse a command that names a session, an extra or a file that is not there."""
    if words[0] == "nox" and "-s" in words:
        after = words[words.index("-s") + 1 :]
        names = after[: after.index("--")] if "--" in after else after
        # matrix-3.12 is the session matrix, on one of its Pythons.
        assert {name.partition("-")[0] for name in names} <= set(sessions())
    for extras in re.findall(r"^(?:\.|eqxshard)\[([\w,]+)\]", "\n".join(words), re.M):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        assert set(extras.split(",")) <= set(project["optional-dependencies"])
    for word in words:
        if re.fullmatch(r"(recipes|benchmarks|tests|docs)/[\w./]+", word):
            assert (ROOT / word).exists()


@pytest.mark.parametrize("where, words", COMMANDS, ids=[where for where, _ in COMMANDS])
def test_a_command_names_what_is_there(where, words):
    check_command(words)


@pytest.mark.parametrize(
    "command",
    ["nox -s test", "pip install -e '.[recipe]'", "python recipes/fashion_mnits.py"],
)
def test_a_misspelt_command_is_noticed(command):
    with pytest.raises(AssertionError):
        check_command(shlex.split(command))


def is_recipe(word):
    return word.startswith("recipes/") and word.endswith(".py")


RUNS = [command for command in COMMANDS if any(map(is_recipe, command[1]))]


@pytest.mark.slow
@pytest.mark.parametrize("where, words", RUNS, ids=[where for where, _ in RUNS])
def test_a_recipe_runs_as_the_page_says(where, words, tmp_path):
    """Variables, flags and values are the page's; `SHORT` is added."""
    index = words.index("python")
    settings = dict(word.split("=", 1) for word in words[:index])
    recipe = next(word for word in words if is_recipe(word))
    short = SHORT[recipe].format(tmp_path).split()
    run = subprocess.run(
        [sys.executable, *words[index + 1 :], *short],
        cwd=ROOT,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert any(tmp_path.iterdir())


def test_the_table_of_the_readme_is_what_was_measured():
    spec = importlib.util.spec_from_file_location("_readme", ROOT / "benchmarks/_readme.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    readme = (ROOT / "README.md").read_text()
    assert module.updated(readme) == readme, "run python benchmarks/_readme.py"
