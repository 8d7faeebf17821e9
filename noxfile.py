"""Every check of the project.

`pip install nox && nox` runs what a newcomer needs: lint, types, docs and the quick tests,
on the Python that runs Nox. Continuous integration runs other sessions, too (`.ci/run`);
those that take longest are run before a release. `nox --list` shows them.
"""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import nox

nox.options.default_venv_backend = "uv|virtualenv"
nox.options.error_on_missing_interpreters = False
nox.options.download_python = "never"
# The quickest first; the tests last, so that their summary is at the end.
nox.options.sessions = ["lint", "docs", "typecheck", "tests"]

# Images for containers often set it. Then each process that a test starts, of which there
# are hundreds, would compile all of JAX's Python anew: two of its five seconds.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

PYPROJECT = nox.project.load_toml("pyproject.toml")
PYTHONS = ["3.11", "3.12", "3.13"]
PACKAGE = ("-e", ".[recipes,gallery]")
# The tests of a file share what they compile, so they stay together.
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

#: The release before the newest JAX that a Python can install.
PREVIOUS_JAX = {"3.11": "jax==0.10.1", "3.12": "jax==0.11.*", "3.13": "jax==0.11.*"}


def group(name: str) -> tuple[str, ...]:
    """The requirements of a dependency group of pyproject.toml."""
    return nox.project.dependency_groups(PYPROJECT, name)


def newest_python() -> str:
    """The newest supported Python on this machine."""

    def runs(python: str) -> bool:
        command = shutil.which(f"python{python}")
        if command is None:
            return False
        # It may be a shim of pyenv, for a version that is not chosen.
        return subprocess.run([command, "-V"], capture_output=True).returncode == 0

    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    return next(filter(runs, reversed(PYTHONS)), running)


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
    """The pages, into build/docs: every link in them must lead somewhere."""
    session.install(*group("docs"))
    # Keeps the theme from printing a notice about MkDocs' future.
    quiet = {"NO_MKDOCS_2_WARNING": "1"}
    session.run("mkdocs", "build", "--strict", "-f", "docs/mkdocs.yml", env=quiet)


@nox.session
def tests(session: nox.Session) -> None:
    """The quick tests, on the newest versions of all dependencies."""
    session.install(*PACKAGE, *group("tests"))
    session.run(*PYTEST, *session.posargs)


@nox.session(default=False)
def recipes(session: nox.Session) -> None:
    """The README's recipe, shortened: one epoch of the smallest model on generated data."""
    session.install(*PACKAGE)
    options = ["--model", "mlp", "--epochs", "1", "--data", "synthetic"]
    output = Path(session.create_tmp()) / "run"
    # Of an earlier run in the same environment.
    shutil.rmtree(output, ignore_errors=True)
    session.run("python", "recipes/fashion_mnist.py", *options, "--output", str(output))


@nox.session(default=False)
def slow(session: nox.Session) -> None:
    """The tests that take minutes: whole runs, and the code on the pages."""
    session.install("-e", ".[recipes,gallery,wandb,mlflow]", *group("tests"))
    # They often wait for other processes: one worker more than there are cores.
    workers = str(min((os.cpu_count() or 1) + 1, 4))
    session.run(*PYTEST, "-n", workers, "-m", "slow and not thorough", *session.posargs)


@nox.session(default=False)
def thorough(session: nox.Session) -> None:
    """More cases of what the other tests cover, before a release: half an hour."""
    session.install("-e", ".[recipes,gallery,wandb,mlflow]", *group("tests"))
    session.run(*PYTEST, "-m", "thorough and not gpu", *session.posargs)
    compile_for_gpus(session, *session.posargs, mark="gpu and thorough")


# With pip, because only pip finds the build of PyTorch for CPUs where it is told of one.
@nox.session(default=False, venv_backend="virtualenv")
def peers(session: nox.Session) -> None:
    """What is tested beside PyTorch, transformers, Flax and Haliax."""
    # The lowest PyTorch that the group allows.
    session.install(*PACKAGE, *group("tests"), *group("peers"), "torch==2.13.*")
    tests = [
        "tests/test_readme.py::test_the_files_of_a_page_run_as_it_says",
        "tests/test_benchmarks.py::test_a_gpt_learns_the_same_as_in_pytorch",
        "tests/checkpoint/test_torch_files.py",
        "tests/recipes/test_gpt_weights.py::test_transformers_reads_what_is_saved",
    ]
    # What JAX deprecates is an error in tests, but peers may use it.
    environment = {"PYTHONWARNINGS": "default"}
    session.run("pytest", "-n", "2", "-m", "not thorough", *tests, env=environment)


@nox.session(default=False)
def stores(session: nox.Session) -> None:
    """Checkpoints in S3 and in Google's store, by servers of their protocols."""
    # Not with the other tests: a server brings the SDK of Amazon, and much else.
    servers = ["moto[server,s3]>=5.1", "gcp-storage-emulator>=2026.7"]
    session.install("-e", ".[recipes,s3,gs]", *group("tests"), *servers)
    files = [f"tests/checkpoint/test_{name}_store.py" for name in ("object", "google")]
    # They mostly wait, for processes and for a server that is away.
    session.run("pytest", "-n", "3", "-m", "slow", *files)


@nox.session(default=False)
def release(session: nox.Session) -> None:
    """Build the sdist and the wheel into build/dist; check them and try the wheel alone."""
    session.install(*PACKAGE, *group("tests"), *group("release"))
    folder = Path("build/dist").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    environment = {"EQXSHARD_DIST": str(folder)}
    command = ["pytest", "-m", "release or not slow", "tests/test_release.py"]
    session.run(*command, *session.posargs, env=environment)


@nox.session(default=False)
def tests_lowest(session: nox.Session) -> None:
    """Some tests of every file, on the oldest versions that pyproject.toml allows."""
    session.install("uv")
    lowest = ["uv", "pip", "install", "--resolution=lowest-direct"]
    session.run(*lowest, *PACKAGE, "--group", "tests", silent=True)
    session.run(*PYTEST, "--part", "1/40", "--every-file", *session.posargs)
    compile_for_gpus(session, "--part", "1/20", "tests/gpu")


@nox.session(default=False, python=newest_python())
def tests_newest(session: nox.Session) -> None:
    """Some tests of every file, on the newest Python here, which has the newest JAX."""
    session.install(*PACKAGE, *group("tests"))
    session.run(*PYTEST, "--part", "2/40", "--every-file", *session.posargs)
    compile_for_gpus(session, "--part", "2/20", "tests/gpu")


@nox.session(default=False, python="3.12")
@nox.parametrize("jax", ["newest", "previous"])
def tests_between(session: nox.Session, jax: str) -> None:
    """A part of the quick tests on Python 3.12, with the newest JAX and the one before."""
    version = [] if jax == "newest" else [PREVIOUS_JAX["3.12"]]
    session.install(*PACKAGE, *group("tests"), *version)
    number = {"newest": "3/30", "previous": "4/30"}[jax]
    session.run(*PYTEST, "--part", number, *session.posargs)


@nox.session(default=False)
def gpu_compile(session: nox.Session) -> None:
    """Compile steps for GPUs that are not there: the tests marked `gpu`."""
    session.install(*PACKAGE, *group("tests"))
    compile_for_gpus(session, *session.posargs)


def compile_for_gpus(
    session: nox.Session, *options: str, mark: str = "gpu and not thorough"
) -> None:
    """Run tests marked `gpu`."""
    if (folder := gpu_compiler(session)) is None:
        return
    # Without the flags for CPUs that the tests set by default.
    environment = {"PYTHONPATH": str(folder), "XLA_FLAGS": ""}
    # They share little, so any worker may take any of them.
    session.run(*PYTEST, "--dist", "load", "-m", mark, *options, env=environment)


def gpu_compiler(session: nox.Session) -> Path | None:
    """Install JAX's GPU compiler, a wheel for Linux, and return the folder it is in.

    A folder of its own: installed beside JAX, it would make every start look for a GPU.
    """
    if platform.system() != "Linux":
        session.log("Nothing for GPUs: JAX's compiler for them is for Linux only.")
        return None
    version = session.run("python", "-c", "import jax; print(jax.__version__)", silent=True)
    folder = Path(session.create_tmp()).resolve() / "pjrt"
    wheel = f"jax-cuda12-pjrt=={str(version).strip()}"
    session.install("--no-deps", "--upgrade", "--target", str(folder), wheel)
    return folder


@nox.session(default=False)
def slurm(session: nox.Session) -> None:
    """The job files, with a SLURM and an sshd that the tests start: those marked `cluster`.

    As root on Debian, installs both; elsewhere, tests are skipped that lack them.
    """
    if shutil.which("slurmctld") is None or not Path("/usr/sbin/sshd").exists():
        install_debian_packages(session, "slurm-wlm", "munge", "openssh-server")
    session.install(*PACKAGE, *group("tests"), *group("cluster"))
    session.run(*PYTEST, "-m", "cluster", *session.posargs)


def install_debian_packages(session: nox.Session, *packages: str) -> None:
    """Install packages without starting their services, if this is root on Debian."""
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        return
    policy = Path("/usr/sbin/policy-rc.d")
    ours = not policy.exists()
    if ours:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    # If it fails, the tests say what they lack.
    quiet = {
        "env": {"DEBIAN_FRONTEND": "noninteractive"},
        "external": True,
        "silent": True,
        "success_codes": range(256),
    }
    try:
        session.run("apt-get", "-qq", "update", **quiet)
        install = ("apt-get", "-qq", "install", "-y", "--no-install-recommends")
        session.run(*install, *packages, **quiet)
    finally:
        if ours:
            policy.unlink()


@nox.session(default=False, python=PYTHONS)
@nox.parametrize("jax", ["newest", "previous"])
def matrix(session: nox.Session, jax: str) -> None:
    """The quick tests on each supported Python, with two releases of JAX."""
    version = [] if jax == "newest" else [PREVIOUS_JAX[str(session.python)]]
    session.install(*PACKAGE, *group("tests"), *version)
    session.run(*PYTEST, *session.posargs)


@nox.session(default=False, venv_backend="virtualenv")  # As for peers.
def bench(session: nox.Session) -> None:
    """The benchmarks, beside their peers: `nox -s bench`, or `-- data epoch` for some.

    Figures and plots are written into build/benchmarks. What is there already, of the same
    code on the same machine, is not measured again.
    """
    session.install(*PACKAGE, *group("bench"))
    folder = gpu_compiler(session)
    # Where the benchmarks find the compiler for GPUs.
    environment = {} if folder is None else {"EQXSHARD_PLAN_DIR": str(folder)}
    session.run("python", "benchmarks/_run.py", *session.posargs, env=environment)
