"""Every check of the project: `pip install nox && nox` runs the default ones.

The default ones run on the Python that runs Nox. `nox -s matrix` runs the tests on every
Python that the project supports and that is on this machine, each with the newest JAX
it can have and with the release before.
"""

from pathlib import Path

import nox

nox.options.default_venv_backend = "uv|virtualenv"
nox.options.error_on_missing_interpreters = False
nox.options.download_python = "never"
# The quickest first; the whole quick test suite last, so that its summary is at the end.
nox.options.sessions = [
    "lint",
    "docs",
    "typecheck",
    "recipes",
    "tests_lowest",
    "slow",
    "tests",
]

PYPROJECT = nox.project.load_toml("pyproject.toml")
PYTHONS = ["3.11", "3.12", "3.13"]
PACKAGE = ("-e", ".[recipes]")
# A file's tests stay together: they share what is compiled.
PYTEST = (
    "pytest",
    "-n",
    "auto",
    "--maxprocesses",
    "4",
    "--dist",
    "loadfile",
    "--max-worker-restart",
    "0",
)

#: JAX ends its support of a Python earlier than we do, so that the newest differs.
PREVIOUS_JAX = {"3.11": "jax==0.10.1", "3.12": "jax==0.11.*", "3.13": "jax==0.11.*"}


def group(name: str) -> tuple[str, ...]:
    """The requirements of a dependency group of pyproject.toml."""
    return nox.project.dependency_groups(PYPROJECT, name)


@nox.session
def lint(session: nox.Session) -> None:
    """Style and format."""
    session.install(*group("lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def typecheck(session: nox.Session) -> None:
    """Static types."""
    session.install(*PACKAGE, *group("tests"), *group("lint"))
    session.run("pyright")


@nox.session
def docs(session: nox.Session) -> None:
    """The pages, into build/docs: every link in them leads somewhere."""
    session.install(*group("docs"))
    # The theme would print a notice about MkDocs' future.
    quiet = {"NO_MKDOCS_2_WARNING": "1"}
    session.run("mkdocs", "build", "--strict", "-f", "docs/mkdocs.yml", env=quiet)


@nox.session
def recipes(session: nox.Session) -> None:
    """The README's recipe, shortened: one epoch of the smallest model on made-up data."""
    session.install(*PACKAGE)
    options = ["--model", "mlp", "--epochs", "1", "--data", "synthetic"]
    output = session.create_tmp()
    session.run("python", "recipes/fashion_mnist.py", *options, "--output", output)


@nox.session
def tests(session: nox.Session) -> None:
    """The tests that take seconds, on the newest of all dependencies."""
    session.install(*PACKAGE, *group("tests"))
    session.run(*PYTEST, *session.posargs)


@nox.session
def tests_lowest(session: nox.Session) -> None:
    """The same on the oldest dependencies that pyproject.toml allows."""
    session.install("uv")
    lowest = ["uv", "pip", "install", "--resolution=lowest-direct"]
    session.run(*lowest, *PACKAGE, "--group", "tests", silent=True)
    session.run(*PYTEST, *session.posargs)


@nox.session
def slow(session: nox.Session) -> None:
    """The tests that take minutes: whole runs, and what the pages show."""
    session.install(*PACKAGE, *group("tests"))
    session.run(*PYTEST, "-m", "slow", *session.posargs)


@nox.session(python=PYTHONS, default=False)
@nox.parametrize("jax", ["newest", "previous"])
def matrix(session: nox.Session, jax: str) -> None:
    """The tests on one of the supported Pythons."""
    version = [] if jax == "newest" else [PREVIOUS_JAX[str(session.python)]]
    session.install(*PACKAGE, *group("tests"), *version)
    session.run(*PYTEST, *session.posargs)


# By pip, which alone finds a build of PyTorch for CPUs where it is told of one.
@nox.session(default=False, venv_backend="virtualenv")
def bench(session: nox.Session) -> None:
    """The benchmarks, beside their peers: `nox -s bench`, or `-- data epoch` for some.

    Figures and plots are written into build/benchmarks.
    """
    session.install(*PACKAGE, *group("bench"))
    names = session.posargs or sorted(
        path.stem for path in Path("benchmarks").glob("*.py") if path.stem[0] != "_"
    )
    for name in names:
        output = ("--output", "build/benchmarks")
        session.run("python", f"benchmarks/{name}.py", *output)
