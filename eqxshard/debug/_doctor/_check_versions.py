"""Versions that do not go together."""

from collections.abc import Iterator

from ._facts import Facts, Finding, version_key

#: For each version of CUDA, the oldest driver that runs it.
OLDEST_DRIVER = {"cuda13": "580", "cuda12": "525"}


def check_python(facts: Facts) -> Iterator[Finding]:
    """Python is too old."""
    if version_key(facts.python) < version_key(facts.needs_python):
        yield Finding(
            f"Python {facts.python} is older than {facts.needs_python}, which eqxshard "
            "needs.",
            f"uv venv --python {facts.needs_python}",
        )


def check_packages(facts: Facts) -> Iterator[Finding]:
    """Packages that are missing or too old."""
    for name, least in facts.needs.items():
        found = facts.packages.get(name)
        command = f'pip install --upgrade "{name}>={least}"'
        if found is None:
            yield Finding(f"{name} is not installed.", command)
        elif version_key(found) < version_key(least):
            yield Finding(
                f"{name} {found} is older than {least}, which eqxshard needs.", command
            )


def check_jaxlib(facts: Facts) -> Iterator[Finding]:
    """JAX and jaxlib that do not fit each other."""
    jax, jaxlib = facts.packages.get("jax"), facts.packages.get("jaxlib")
    if jax is None:
        return
    command = f'pip install --upgrade "jax=={jax}" "jaxlib=={jax}"'
    if jaxlib is None:
        yield Finding(f"jaxlib is not installed beside jax {jax}.", command)
    elif facts.jaxlib is not None:
        low, high = map(version_key, facts.jaxlib)
        if not low <= version_key(jaxlib) <= high:
            yield Finding(
                f"jax {jax} takes jaxlib {facts.jaxlib[0]} to {facts.jaxlib[1]}, and "
                f"{jaxlib} is installed.",
                command,
            )


def check_plugins(facts: Facts) -> Iterator[Finding]:
    """Plug-ins for GPUs of another version than JAX, or of two versions of CUDA."""
    jaxlib = facts.packages.get("jaxlib")
    both = [cuda for cuda in OLDEST_DRIVER if f"jax-{cuda}-plugin" in facts.packages]
    if len(both) == 2:
        worse = next(cuda for cuda in OLDEST_DRIVER if cuda != best_cuda(facts.driver))
        yield Finding(
            "The plug-ins for CUDA 12 and CUDA 13 are both installed, and JAX loads only "
            "one.",
            f"pip uninstall -y jax-{worse}-plugin jax-{worse}-pjrt",
        )
    for cuda in OLDEST_DRIVER:
        for name in (f"jax-{cuda}-plugin", f"jax-{cuda}-pjrt"):
            found = facts.packages.get(name)
            if found and jaxlib and version_key(found) != version_key(jaxlib):
                yield Finding(
                    f"{name} {found} and jaxlib {jaxlib} differ, so JAX may leave it out.",
                    install(facts, cuda),
                )
        plugin, client = f"jax-{cuda}-plugin", f"jax-{cuda}-pjrt"
        if plugin in facts.packages and client not in facts.packages:
            yield Finding(f"{plugin} is installed without {client}.", install(facts, cuda))


def check_stray_client(facts: Facts) -> Iterator[Finding]:
    """A compiler for GPUs where there are none: JAX logs an error at every start."""
    if facts.driver is not None:
        return
    for cuda in OLDEST_DRIVER:
        name = f"jax-{cuda}-pjrt"
        if name in facts.packages:
            yield Finding(
                f"{name} is installed on a machine without NVIDIA's driver, so every start "
                "of JAX logs an error; plans also find it in a folder of its own "
                "(python -m eqxshard plan says how to install it there).",
                f"pip uninstall -y {name} jax-{cuda}-plugin",
                is_wrong=False,
            )


def best_cuda(driver: str | None) -> str | None:
    """The newest version of CUDA that a driver runs."""
    for cuda, oldest in OLDEST_DRIVER.items():
        if driver is not None and version_key(driver) >= version_key(oldest):
            return cuda
    return None


def install(facts: Facts, cuda: str) -> str:
    """The command that installs JAX for a version of CUDA."""
    jax = facts.packages.get("jax")
    return f'pip install --upgrade "jax[{cuda}]{f"=={jax}" if jax else ""}"'
