"""The README and the pages are true: names, commands, programs and their output.

The Python blocks of a page are one program, in order, which may go on from another page's:
`<!-- after the first block of loop.md -->`, or `<!-- after loop.md -->` for all of them. A
`text` block right after one is its output, in which `...` stands for anything and `/runs`
for the working folder. A Python block with a title is a file of its own; a page with files
has commands that run them, all in one folder. Recipes run shortened, with the flags of
`SHORT`. A block under `<!-- not run -->` is only read. The pictures that a program draws
are those in `docs/pictures`, which the page shows below the code.
"""

import ast
import doctest
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
from grades import on_versions
from process_helpers import finished, read_until, started

import eqxshard

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "pictures"
GUIDE = ROOT / "docs" / "pages" / "guide"
PAGES = [ROOT / "README.md", ROOT / ".github" / "CONTRIBUTING.md"]
PAGES += sorted((ROOT / "docs").rglob("*.md"))

#: Flags that make a recipe take seconds; `{}` is a folder to write to.
SHORT = {
    "recipes/fashion_mnist.py": "--model mlp --steps 10 --data synthetic --output {}/run",
    "recipes/gpt.py": "--data {}/words.txt --steps 4 --length 8 --output {}/run",
}
#: Words of commands that plan, and shorter work to put in their place.
SMALL = {"70b": "tiny", "512xh200": "8xh200", "data=8,fsdp=64": "data=2,fsdp=4"}

#: Printed after each block of a program.
_MARK = "\0"
_BLOCK = re.compile(
    r"(?P<off><!-- not run -->\s*)?^(?P<indent> *)```(?P<language>\w+)"
    r'(?: title="(?P<title>[\w.]+)")?[^\n]*\n(?P<text>.*?)^(?P=indent)```$',
    re.MULTILINE | re.DOTALL,
)
_AFTER = re.compile(r"^<!-- after (the first block of )?([\w-]+\.md) -->$", re.MULTILINE)
#: The file of a picture that a program draws.
_PICTURE = re.compile(r"^Path\(\"([\w-]+\.svg)\"\)\.write_text\(", re.MULTILINE)
_OUTPUT = re.compile(r"\s*^ *```text\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    page: Path
    language: str
    title: str | None
    line: int  # of its first line of text
    text: str
    output: str | None
    runs: bool


def blocks(page, *languages):
    text = page.read_text()
    for match in _BLOCK.finditer(text):
        if match["language"] in languages:
            line = text.count("\n", 0, match.start("text")) + 1
            code = textwrap.dedent(match["text"])
            output = _OUTPUT.match(text, match.end())
            yield Block(
                page,
                match["language"],
                match["title"],
                line,
                code,
                output and textwrap.dedent(output[1]),
                match["off"] is None,
            )


def program_blocks(page):
    """The blocks of a page's program, after those that it goes on from."""
    own = [b for b in blocks(page, "python") if b.runs and b.title is None]
    after = _AFTER.search(page.read_text())
    if after is None:
        return own
    before = program_blocks(page.parent / after[2])
    return [*(before[:1] if after[1] else before), *own]


def program(parts, *, mark=""):
    """The text of some blocks, each line at the line where the page has it."""
    lines: list[str] = []
    for block in parts:
        lines += [""] * (block.line - 1 - len(lines)) + block.text.splitlines()
        lines += [mark] if mark else []
    return "\n".join(lines)


def files(page):
    """The files that a page shows, by name."""
    return {b.title: b.text for b in blocks(page, "python") if b.title is not None}


class Command(NamedTuple):
    page: Path
    line: int
    words: list[str]
    runs: bool

    def __str__(self):
        return f"{self.page.name}:{self.line}"


def commands(page):
    """The shell commands of a page."""
    for block in blocks(page, "bash", "sh", "console"):
        whole = block.text.replace("\\\n", " ")
        for offset, line in enumerate(whole.splitlines()):
            for part in line.removeprefix("$ ").split("&&"):
                words = shlex.split(part, comments=True)
                if words:
                    yield Command(page, block.line + offset, words, block.runs)


COMMANDS = [command for page in PAGES for command in commands(page)]


def each(parameter, values):
    def name(value):
        return str(value.relative_to(ROOT)) if isinstance(value, Path) else str(value)

    return pytest.mark.parametrize(parameter, values, ids=name)


def environment(**settings):
    """A reader's environment, with 8 simulated devices, where lock files are written."""
    rest = {name: value for name, value in os.environ.items() if name != "CI"}
    return {**rest, "JAX_PLATFORMS": "cpu", **settings}


def run(command, folder, **settings):
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment(**settings),
        capture_output=True,
        text=True,
    )


def check_names(code):
    """Refuse a dotted name of ours that leads to nothing."""
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Attribute):
            continue
        # Not the attributes of a call's result: only names and dots.
        name = ast.unparse(node)
        if re.fullmatch(r"eqxshard(\.\w+)+", name):
            target = eqxshard
            for part in name.split(".")[1:]:
                assert hasattr(target, part), f"line {node.lineno}: {name}"
                target = getattr(target, part)


@each("page", PAGES)
def test_the_names_that_a_page_uses_are_ours(page):
    for block in blocks(page, "python"):
        check_names(block.text)


def prints(block, printed):
    """True if a block may print this."""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    check = doctest.OutputChecker().check_output
    return block.output is None or check(block.output, printed, flags)


@pytest.mark.slow
# With jax.export, which JAX may change.
@each("page", on_versions(filter(program_blocks, PAGES), [GUIDE / "trained-model.md"]))
def test_the_python_of_a_page_runs_and_prints_what_it_shows(page, tmp_path):
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    parts = program_blocks(page)
    text = program(parts, mark=f"print({_MARK!r}, end='')")
    # With Python's log, but not that of C++; and as a script, not as a notebook.
    code = f"import sys; sys.stderr = sys.stdout; __file__ = {str(page)!r}\n"
    code += f"exec(compile({text!r}, {str(page)!r}, 'exec'))"
    done = run(["-c", code], tmp_path, JAX_NUM_CPU_DEVICES="8")
    assert done.returncode == 0, done.stdout + done.stderr
    for block, printed in zip(parts, done.stdout.split(_MARK)):
        printed = printed.replace(str(tmp_path), "/runs")
        printed = printed.replace(str(page), "/runs/train.py")
        # The page says where in a script of its own.
        printed = re.sub(r"(?<=/runs/train\.py:)\d+", "15", printed)
        printed = re.sub(r"^compiling the .*\n", "", printed, flags=re.MULTILINE)
        # Where Orbax is installed, Grain imports it, and with it absl's logging.
        printed = re.sub(r"^WARNING:eqxshard[\w.]*:", "", printed, flags=re.MULTILINE)
        if "goodput" not in (block.output or ""):
            # The line at the end of each fit, which the pages mention once.
            printed = re.sub(r"^goodput \d+ % of .*\n", "", printed, flags=re.MULTILINE)
        assert prints(block, printed), f"{page.name}:{block.line} prints\n{printed}"
        for name in _PICTURE.findall(block.text):
            drawn, shown = tmp_path / name, PICTURES / name
            assert drawn.read_text() == shown.read_text(), f"copy {drawn} to {shown}"


def test_the_index_lists_every_page():
    """A forge has no navigation beside the pages."""
    pages = ROOT / "docs" / "pages"
    linked = re.findall(r"\]\(([\w./-]+)", (pages / "index.md").read_text())
    targets = {(pages / link).resolve() for link in linked}
    every = {*pages.rglob("*.md"), *(ROOT / "docs" / "notebooks").glob("*.ipynb")}
    assert every - targets == {pages / "index.md"}


def test_every_picture_is_drawn_by_one_page():
    drawn = [name for page in PAGES for name in _PICTURE.findall(page.read_text())]
    assert sorted(drawn) == sorted(path.name for path in PICTURES.iterdir())


def sessions():
    """The names of the functions that noxfile.py marks as sessions."""
    for node in ast.parse((ROOT / "noxfile.py").read_text()).body:
        if isinstance(node, ast.FunctionDef):
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            if any(decorator.startswith("nox.session") for decorator in decorators):
                yield node.name


def check_command(words):
    """Refuse a command that names a session, an extra or a file that does not exist."""
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


@each("command", COMMANDS)
def test_a_command_names_what_is_there(command):
    check_command(command.words)


def is_recipe(word):
    return word.startswith("recipes/") and word.endswith(".py")


def split_command(words):
    """The settings of environment variables before `python`, and the words after it."""
    index = words.index("python")
    return dict(word.split("=", 1) for word in words[:index]), words[index + 1 :]


RUN = [c for c in COMMANDS if c.runs and any(map(is_recipe, c.words))]


@pytest.mark.slow
@each("command", [c for c in RUN if "--plan" not in c.words])
def test_a_recipe_runs_as_the_page_says(command, tmp_path):
    settings, words = split_command(command.words)
    recipe = next(word for word in words if is_recipe(word))
    (tmp_path / "words.txt").write_text("a text of few words\n" * 200)
    short = SHORT[recipe].replace("{}", str(tmp_path)).split()
    done = run([*words, *short], ROOT, **settings)
    assert done.returncode == 0, done.stderr
    assert any((tmp_path / "run").iterdir())


@pytest.mark.slow
@each("command", [c for c in RUN if "--plan" in c.words])
def test_a_recipe_is_planned_as_the_page_says(command, tmp_path):
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    settings, words = split_command([SMALL.get(word, word) for word in command.words])
    done = run(words, tmp_path, **settings)
    assert done.returncode == 0, done.stderr
    assert "memory of a device" in done.stdout
    written = {path.name for path in tmp_path.iterdir()} - {"recipes"}
    assert written == {"plan.json"} & set(words)


#: Accuracies, losses and speeds: the page has them from the real images.
_MEASURED = re.compile(r"(?<=loss )[\d.]+|(?<=accuracy )[\d.]+|[\d.,]+(?= \w+/(?:s|epoch))")


def check_printed(shown, printed):
    """Refuse a run's output that differs from a page, except for measured numbers."""
    text = printed[printed.index(shown.split(maxsplit=1)[0]) :]
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    check = doctest.OutputChecker().check_output
    assert check(_MEASURED.sub("0", shown), _MEASURED.sub("0", text), flags), printed


@pytest.mark.slow
def test_a_killed_run_goes_on_as_the_readme_shows(tmp_path):
    """And ends with the accuracy of one that was never killed."""
    shown = [b for b in blocks(ROOT / "README.md", "bash") if b.output is not None]
    before, after = (block.output or "" for block in shown)
    killed, resumed = (
        [sys.executable, "-u", *shlex.split(block.text.replace("\\\n", ""))[1:]]
        for block in shown
    )
    where = killed.index("--output") + 1
    output, killed[where] = killed[where], str(tmp_path / "run")
    resumed[resumed.index(output)] = killed[where]
    whole = [*resumed[:-2], "--output", str(tmp_path / "whole")]
    assert resumed[-2:] == ["--resume", "yes"]
    flags = ["--data", "synthetic"]
    together = {"cwd": ROOT, "env": environment(), "stderr": subprocess.STDOUT}

    with started([*killed, *flags], **together) as process:
        steps = re.findall(r"step (\d+)/", before)
        lines = read_until(process, process.stdout, f"step {steps[-1]}/")
        lines += read_until(process, process.stdout, f"step {steps[-1]}/")
        kept = tmp_path / "run" / "checkpoints"
        while not (kept / steps[-1] / "checksums.txt").exists():
            assert process.poll() is None
            time.sleep(0.05)
    check_printed(before, "".join(lines))
    for later in kept.glob("[0-9]*"):
        # The run was not killed at once, so it may have saved more.
        if int(later.name) > int(steps[-1]):
            shutil.rmtree(later)

    status, out, _ = finished([*resumed, *flags], **together)
    assert status == 0, out
    check_printed(after, out)
    status, out, _ = finished([*whole, *flags], **together)
    assert status == 0, out
    went_on, never_killed = (
        json.loads((tmp_path / name / "summary.json").read_text())["test_accuracy"]
        for name in ("run", "whole")
    )
    assert went_on == pytest.approx(never_killed, abs=0.01)


PAGES_WITH_FILES = [page for page in PAGES if files(page)]


@pytest.mark.slow
@each("page", PAGES_WITH_FILES)
def test_the_files_of_a_page_run_as_it_says(page, tmp_path):
    for name, text in files(page).items():
        assert len(text.splitlines()) <= 60, "the guide promises a recipe in 60 lines"
        (tmp_path / name).write_text(text)
    for command in commands(page):
        if files(page).keys() & set(command.words):
            settings, words = split_command(command.words)
            done = run(words, tmp_path, **settings)
            assert done.returncode == 0, f"{command}: {done.stderr}"


@pytest.mark.parametrize("name", ["README.md", "docs/pages/performance.md"])
def test_the_tables_of_a_page_are_what_was_measured(name):
    spec = importlib.util.spec_from_file_location("_readme", ROOT / "benchmarks/_readme.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (ROOT / name).read_text()
    assert module.updated(page) == page, "run python benchmarks/_readme.py"
