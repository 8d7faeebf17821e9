"""`keep_programs`: the compiled steps of a run, kept for when it resumes.

Each process has a folder of its own. `programs.json` lists them, by a digest of what was
compiled, which is the name of a file. A program is listed before it first runs.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.sharding import Mesh
from jaxtyping import PyTree

from .._errors import UsageError
from ..distributed import allgather_json
from ..sharding._files import local_path, read_bytes, read_json
from ..sharding._mesh import describe_mesh, is_on_cpus
from ..sharding._text import first_few
from ..training._step import Call, keeper
from ..transforms._cache import compiling_anew, is_writable_by_others, processor_kind

_LOG = logging.getLogger(__name__)

#: The file that lists the programs of a folder.
_LIST = "programs.json"
#: The names of files of programs.
_DIGEST = "[0-9a-f]" * 32

_CHANGED = (
    "the model, loss, optimizer (its schedule, for one) or shapes have changed, and with "
    "them what is compiled"
)
#: Packages that decide what a program computes, to the last bit.
_PACKAGES = re.compile(r"jax|jaxlib|jax-cuda.*|nvidia-.*|libtpu")
#: Flags of XLA that do not.
_HARMLESS = ("--xla_dump_", "--xla_force_host_platform_device_count")


@contextlib.contextmanager
def keep_programs(folder: str | os.PathLike[str], *, resume: bool) -> Iterator[None]:
    """Keep the compiled programs of train and eval steps; resume a run with the same ones.

    On a GPU, XLA times several kernels for each operation and takes the fastest, which
    may be another one after a restart, and round otherwise. With the programs of its
    first start, a run goes on with the same kernels, and compiles nothing. They are those
    of steps that are first called in this context.

    What is in the folder runs on the devices, so nobody else may be able to write it.

    **Arguments:**

    - `folder`: a local folder of the run's own. Each process keeps its own programs in it.
    - `resume`: whether the run goes on from a checkpoint. If so, train steps are read from
        the folder, and eval steps if they have not changed (else a warning says so). If
        not, what is there of an earlier attempt is removed.

    **Returns:**

    A context manager.

    **Raises:**

    `ValueError`. In the context, steps raise it when they are first called, before
    anything is donated, if the program that is kept cannot be used: it is missing or
    damaged, or was compiled of another model, loss or optimizer, for other devices, or
    with other versions or flags of XLA; or if a program cannot be kept, because it calls
    back to Python or was compiled before.

    !!! Example

        ```python
        with eqxshard.keep_programs("mlp/programs", resume=bool(checkpointer.steps())):
            state = eqxshard.fit(state, train_step, loader, checkpointer=checkpointer)
        ```
    """
    path = local_path(folder, "the folder of programs")
    token = keeper.set(_Programs(path / str(jax.process_index()), resume))
    try:
        yield
    finally:
        keeper.reset(token)


class _Programs:
    """The programs in the folder of a process, for `StepMachine`."""

    def __init__(self, folder: Path, resume: bool):
        self._folder, self._resumes = folder, resume
        #: The digests of what was compiled or read here, and that itself, by its arguments.
        self._digests: set[str] = set()
        self._programs: dict[Any, jax.stages.Compiled] = {}
        #: What was read here, by name. Of these, other shapes may be new.
        self._read_names: set[str] = set()

    def get(self, call: Call, batch: PyTree) -> jax.stages.Compiled | None:
        """What this has compiled or read for arguments of these shapes."""
        return self._programs.get(_shapes(call, batch))

    def compile(
        self, lowered: jax.stages.Lowered, name: str, of: str, call: Call, batch: PyTree
    ) -> jax.stages.Compiled:
        """Compile a program and keep it; or read it, if it is kept."""
        mesh, full_name = call.variant.mesh, f"{name} of {of}"
        processes = {device.process_index for device in mesh.devices.flat}
        if len(processes) < jax.process_count():
            raise UsageError(
                f"{full_name} does not run on the devices of all processes, so its program "
                "cannot be kept; call it outside of keep_programs."
            )
        digest = hashlib.sha256(lowered.as_text().encode()).hexdigest()[:32]
        # Who renames a loss function trains by the same step.
        trains = call.state is not None
        about = {"name": name if trains else full_name, "made_with": _made_with(mesh)}
        compiled = None
        if self._resumes or digest in self._digests:
            compiled, fault = self._read(lowered, mesh, digest, about)
            if not all(allgather_json(compiled is not None)):
                compiled = None  # One was killed when the others had written theirs.
            if (fault := _first(fault)) and trains:
                raise UsageError(
                    f"{full_name} cannot be run as it was compiled: {fault}; undo that, or "
                    "resume without keep_programs, which may choose other kernels."
                )
            if fault:
                _LOG.warning("%s is compiled again: %s.", full_name, fault)
        if compiled is None:
            compiled, fault = self._make(lowered, digest, about)
            if fault := _first(fault):
                raise UsageError(
                    f"the program of {full_name} cannot be kept: {fault}, or leave out "
                    "keep_programs."
                )
        self._digests.add(digest)
        self._programs[_shapes(call, batch)] = compiled
        return compiled

    def _read(
        self, lowered: jax.stages.Lowered, mesh: Mesh, digest: str, about: dict[str, Any]
    ) -> tuple[jax.stages.Compiled | None, str]:
        """A program if it is there; and what is wrong if it should be."""
        try:
            listed = self._listed()
            if not listed:
                return None, f"{self._folder} has no programs, as of a run without them"
            same = [each for each in listed.values() if each["name"] == about["name"]]
            kept = listed.get(digest, same[-1] if same else None)
            if kept is None:
                return None, ""  # Such as of a number of batches that is new.
            before, now = kept["made_with"], about["made_with"]
            changes = [
                f"{name} {before.get(name, 'none')} -> {now.get(name, 'none')}"
                for name in {**before, **now}
                if before.get(name) != now.get(name)
            ]
            if changes:
                return None, f"it was compiled otherwise ({first_few(changes)})"
            if digest not in listed:
                return None, "" if about["name"] in self._read_names else _CHANGED
            if is_writable_by_others(self._folder):
                return None, f"other users may write to {self._folder}"
            file = self._folder / digest
            data = read_bytes(file)
            if hashlib.sha256(data).hexdigest() != kept["sha256"]:
                return None, f"{file} is damaged"
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            return None, f"{self._folder} cannot be read ({_line(error)})"
        try:
            devices = [*mesh.devices.flat]
            trees = lowered.in_tree, lowered.out_tree
            compiled = deserialize_and_load(data, *trees, execution_devices=devices)
        except Exception as error:  # Of any kind, by JAX and its plugins.
            return None, f"JAX cannot load {file} ({_line(error)})"
        self._read_names.add(about["name"])
        return compiled, ""

    def _make(
        self, lowered: jax.stages.Lowered, digest: str, about: dict[str, Any]
    ) -> tuple[jax.stages.Compiled, str]:
        """What is compiled and kept now; and what is wrong."""
        # On GPUs, processes share the work of timing kernels, and wait for each other.
        with compiling_anew() as events:
            compiled = lowered.compile()
        if "backend_compile_duration" not in events:
            return compiled, "it was compiled before; make the step anew"
        try:
            data, *_ = serialize(compiled)
        except Exception as error:  # Of any kind, by JAX and its plugins.
            why = "if it calls back to Python, such as by jax.debug.print, leave that out"
            return compiled, f"JAX cannot serialize it ({_line(error)}); {why}"
        try:
            if not self._digests and not self._resumes:
                self._clear()
            self._folder.mkdir(parents=True, exist_ok=True)
            if is_writable_by_others(self._folder):
                return compiled, f"other users may write to {self._folder}; give another"
            (self._folder / digest).write_bytes(data)
            kept = {**about, "sha256": hashlib.sha256(data).hexdigest()}
            part = self._folder / f".{_LIST}.part"
            part.write_text(json.dumps({**self._listed(), digest: kept}, indent=1) + "\n")
            part.replace(self._folder / _LIST)
        except OSError as error:
            why = error.strerror or error
            return compiled, f"{self._folder} cannot be written ({why}); give another"
        return compiled, ""

    def _listed(self) -> dict[str, Any]:
        """What the list of programs has, by digest."""
        file = self._folder / _LIST
        return read_json(file) if file.exists() else {}

    def _clear(self) -> None:
        """Remove the programs of an earlier attempt."""
        for path in (self._folder / _LIST, *self._folder.glob(_DIGEST)):
            path.unlink(missing_ok=True)


def _first(fault: str) -> str:
    """What is wrong in the first process in which something is."""
    return next(filter(None, allgather_json(fault)), "")


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _shapes(call: Call, batch: PyTree) -> Any:
    leaves, structure = jax.tree.flatten((call.kept, batch))
    return call.variant.jitted, structure, *((x.shape, x.dtype) for x in leaves)


def _made_with(mesh: Mesh) -> dict[str, str]:
    """What a program depends on besides its text, by name."""
    packages = {
        str(each.metadata["Name"]): each.version
        for each in importlib.metadata.distributions()
    }
    variables = (os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"))
    flags = (flag.partition("=") for flag in " ".join(variables).split())
    devices = [*mesh.devices.flat]
    order = ",".join(str(device.id) for device in devices)
    about = {
        "device": devices[0].device_kind,
        "compute capability": getattr(devices[0], "compute_capability", ""),
        "processor": processor_kind() if is_on_cpus(mesh) else "",
        "mesh": describe_mesh(mesh),
        "order of devices": hashlib.sha256(order.encode()).hexdigest()[:8],
        "processes": str(jax.process_count()),
        "platform": devices[0].client.platform_version,
    }
    return {
        **{k: v for k, v in sorted(packages.items()) if _PACKAGES.fullmatch(k)},
        **{k: v for k, v in about.items() if v},
        **{name: on or "true" for name, _, on in flags if not name.startswith(_HARMLESS)},
    }
