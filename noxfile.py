"""Every check of the project.

`pip install nox && nox` runs what a contributor needs: lint, types and the quick tests, on
the Python that runs Nox, in about five minutes. Continuous integration also runs the docs,
the slow tests and other versions of Python and JAX (`.ci/run`); a few sessions run before
a release. `nox --list` shows them all.
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
# The tests come last, so that their summary is at the end.
nox.options.sessions = ["lint", "typecheck", "tests"]

# Container images often set this variable. Every process that a test starts would then
# compile JAX's Python files again, which takes two of its five seconds.
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

#: Files of tests for a Python and a JAX that are each tested elsewhere, not together:
#: steps, checkpoints and whole runs.
TOGETHER = (
    "tests/checkpoint/test_checkpointer.py",
    "tests/run",
    "tests/test_package.py",
    "tests/test_way_in.py",
    "tests/training/test_train_step.py",
)


def group(name: str) -> tuple[str, ...]:
    """The requirements of a dependency group of pyproject.toml."""
    return nox.project.dependency_groups(PYPROJECT, name)


def newest_python() -> str:
    """The newest supported Python on this machine."""

    def runs(python: str) -> bool:
        command = shutil.which(f"python{python}")
        if command is None:
            return False
        # It may be a shim of pyenv, for a version that is not selected.
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
    """Build the pages into build/docs; a broken link is an error."""
    session.install(*group("docs"))
    # Silences the theme's notice about the future of MkDocs.
    quiet = {"NO_MKDOCS_2_WARNING": "1"}
    session.run("mkdocs", "build", "--strict", "-f", "docs/mkdocs.yml", env=quiet)


@nox.session
def tests(session: nox.Session) -> None:
    """The quick tests, on the newest versions of all dependencies."""
    session.install(*PACKAGE, *group("tests"))
    session.run(*PYTEST, *session.posargs)


@nox.session(default=False)
def slow(session: nox.Session) -> None:
    """The slow tests: whole runs, variants of quick tests, and the code on the pages."""
    session.install("-e", ".[recipes,gallery,wandb,mlflow]", *group("tests"))
    # They often wait for other processes, so one worker more than there are cores.
    workers = str(min((os.cpu_count() or 1) + 1, 4))
    session.run(*PYTEST, "-n", workers, "-m", "slow and not thorough", *session.posargs)


@nox.session(default=False)
def thorough(session: nox.Session) -> None:
    """More cases of what other tests cover; for a release. Takes half an hour."""
    session.install("-e", ".[recipes,gallery,wandb,mlflow]", *group("tests"))
    session.run(*PYTEST, "-m", "thorough and not gpu", *session.posargs)
    compile_for_gpus(session, *session.posargs, mark="gpu and thorough")


# With pip, because uv ignores pip's setting of an index with PyTorch for CPUs.
@nox.session(default=False, venv_backend="virtualenv")
def peers(session: nox.Session) -> None:
    """The tests that compare with PyTorch and transformers."""
    # The lowest PyTorch that the group allows.
    session.install(*PACKAGE, *group("tests"), *group("peers"), "torch==2.13.*")
    tests = [
        "tests/test_benchmarks.py::test_a_gpt_learns_the_same_as_in_pytorch",
        "tests/recipes/test_gpt_weights.py::test_transformers_reads_what_is_saved",
    ]
    # The peers may use what JAX has deprecated, which is an error in the other tests.
    environment = {"PYTHONWARNINGS": "default"}
    session.run("pytest", "-n", "2", "-m", "not thorough", *tests, env=environment)


@nox.session(default=False)
def stores(session: nox.Session) -> None:
    """Checkpoints in S3 and Google Cloud Storage, on local servers of their protocols."""
    # A session of its own, because the servers bring Amazon's SDK and much else.
    servers = ["moto[server,s3]>=5.1", "gcp-storage-emulator>=2026.7"]
    session.install("-e", ".[recipes,s3,gs]", *group("tests"), *servers)
    files = [f"tests/checkpoint/test_{name}_store.py" for name in ("object", "google")]
    # Mostly they wait for processes and servers.
    session.run("pytest", "-n", "3", "-m", "slow", *files)


@nox.session(default=False)
def release(session: nox.Session) -> None:
    """Build the sdist and the wheel into build/dist, check them, and try the wheel."""
    session.install(*PACKAGE, *group("tests"), *group("release"))
    folder = Path("build/dist").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    environment = {"EQXSHARD_DIST": str(folder)}
    command = ["pytest", "-m", "release or not slow", "tests/test_release.py"]
    session.run(*command, *session.posargs, env=environment)


@nox.session(default=False)
def tests_lowest(session: nox.Session) -> None:
    """The tests marked `versions`, on the oldest versions that pyproject.toml allows."""
    session.install("uv")
    lowest = ["uv", "pip", "install", "--resolution=lowest-direct"]
    session.run(*lowest, *PACKAGE, "--group", "tests", silent=True)
    run_versions(session)


@nox.session(default=False, python="3.12")
@nox.parametrize("jax", ["newest", "previous"])
def tests_between(session: nox.Session, jax: str) -> None:
    """Tests marked `versions`, on Python 3.12 with the two newest releases of JAX."""
    version = [] if jax == "newest" else [PREVIOUS_JAX["3.12"]]
    session.install(*PACKAGE, *group("tests"), *version)
    # The newest JAX is tested on Python 3.13, and Python 3.12 with the release before.
    files = TOGETHER if jax == "newest" else ()
    run_versions(session, *files, gpu=False)


@nox.session(default=False, python=newest_python())
def tests_newest(session: nox.Session) -> None:
    """The tests marked `versions`, on the newest Python here, which has the newest JAX."""
    session.install(*PACKAGE, *group("tests"))
    run_versions(session)


def run_versions(session: nox.Session, *files: str, gpu: bool = True) -> None:
    """Run the tests marked `versions`, which a change of JAX could break."""
    mark = "versions and not thorough and not gpu"
    session.run(*PYTEST, "-m", mark, *(session.posargs or files))
    if gpu:
        compile_for_gpus(session, "tests/gpu", mark="versions and gpu and not thorough")


@nox.session(default=False)
def gpu_compile(session: nox.Session) -> None:
    """The tests marked `gpu`, which compile steps for GPUs. They need no GPU."""
    session.install(*PACKAGE, *group("tests"))
    compile_for_gpus(session, *session.posargs)


def compile_for_gpus(
    session: nox.Session, *options: str, mark: str = "gpu and not thorough"
) -> None:
    """Run tests marked `gpu`."""
    if (folder := gpu_compiler(session)) is None:
        return
    # An empty XLA_FLAGS keeps the tests from setting their flags for CPUs.
    environment = {"PYTHONPATH": str(folder), "XLA_FLAGS": ""}
    # These share little of what they compile, so any worker may take any of them.
    session.run(*PYTEST, "--dist", "load", "-m", mark, *options, env=environment)


def gpu_compiler(session: nox.Session) -> Path | None:
    """Install JAX's compiler for GPUs, and return the folder that it is in.

    It has a folder of its own: installed beside JAX, it makes every start look for a GPU.
    """
    if platform.system() != "Linux":
        session.log("Skipping the tests for GPUs: JAX's compiler for them needs Linux.")
        return None
    version = session.run("python", "-c", "import jax; print(jax.__version__)", silent=True)
    folder = Path(session.create_tmp()).resolve() / "pjrt"
    wheel = f"jax-cuda12-pjrt=={str(version).strip()}"
    session.install("--no-deps", "--upgrade", "--target", str(folder), wheel)
    return folder


@nox.session(default=False)
def slurm(session: nox.Session) -> None:
    """The tests marked `cluster`, which run job files on a local SLURM and sshd.

    As root on Debian, this installs both. Elsewhere, tests that lack one are skipped.
    """
    if shutil.which("slurmctld") is None or not Path("/usr/sbin/sshd").exists():
        install_debian_packages(session, "slurm-wlm", "munge", "openssh-server")
    session.install(*PACKAGE, *group("tests"), *group("cluster"))
    session.run(*PYTEST, "-m", "cluster and not thorough", *session.posargs)


def install_debian_packages(session: nox.Session, *packages: str) -> None:
    """Install packages without starting their services, if this is root on Debian."""
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        return
    policy = Path("/usr/sbin/policy-rc.d")
    ours = not policy.exists()
    if ours:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    # If this fails, the tests say what they lack.
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
    """The quick tests on each supported Python and two releases of JAX; for a release."""
    version = [] if jax == "newest" else [PREVIOUS_JAX[str(session.python)]]
    session.install(*PACKAGE, *group("tests"), *version)
    session.run(*PYTEST, *session.posargs)


@nox.session(default=False, venv_backend="virtualenv")  # As for peers.
def bench(session: nox.Session) -> None:
    """The benchmarks of eqxshard and its peers; `nox -s bench -- data epoch` for some.

    Writes figures and plots to build/benchmarks.
    """
    session.install(*PACKAGE, *group("bench"))
    folder = gpu_compiler(session)
    # The benchmarks look for the compiler for GPUs there.
    environment = {} if folder is None else {"EQXSHARD_PLAN_DIR": str(folder)}
    session.run("python", "benchmarks/_run.py", *session.posargs, env=environment)
