"""Folders, disks, memory, cores and clusters."""

from collections.abc import Iterator

from ._facts import Facts, Finding

_GB = 1_000_000_000
#: Below these, something is wrong; below ten times as much, it is worth knowing.
_LEAST_DISK = 1 * _GB
_LEAST_SHARED = 1 * _GB
_LEAST_MEMORY = 1 * _GB
#: A compilation cache that is larger is mostly of programs that nobody runs any more.
_LARGE_CACHE = 20 * _GB

_PROCESSES = ("EQXSHARD_ADDRESS", "EQXSHARD_PROCESSES", "EQXSHARD_PROCESS")


def check_folders(facts: Facts) -> Iterator[Finding]:
    """Folders that cannot be used, or that others can write to."""
    for each in facts.folders:
        if each.name == "data" and not each.exists:
            yield Finding(
                f"EQXSHARD_DATA_DIR is {each.path}, which does not exist.",
                f"mkdir -p {each.path}",
            )
        if each.exists and not each.is_writable and each.name != "data":
            yield Finding(
                f"The {each.name} folder {each.path} cannot be written to.",
                f"chmod u+rwx {each.path}",
            )
        if each.name != "compilation cache":
            continue
        if each.is_foreign:
            yield Finding(
                f"The compilation cache {each.path} belongs to another user, so nothing is "
                "cached: what is in it would run here.",
                "export JAX_COMPILATION_CACHE_DIR=$HOME/.cache/jax",
            )
        elif each.is_open:
            yield Finding(
                f"All users may write to the compilation cache {each.path}, so nothing is "
                "cached: what is in it would run here.",
                f"chmod o-w {each.path}",
            )
        if each.nbytes is not None and each.nbytes > _LARGE_CACHE:
            yield Finding(
                f"The compilation cache {each.path} has {each.nbytes / _GB:.0f} GB.",
                f"rm -r {each.path}",
                is_wrong=False,
            )


def check_disks(facts: Facts) -> Iterator[Finding]:
    """File systems that are nearly full."""
    for each in facts.disks:
        if each.name == "shared memory":
            continue
        if each.free < 10 * _LEAST_DISK:
            yield Finding(
                f"{each.free / _GB:.1f} GB are free for the {each.name}, {each.path}; "
                "checkpoints are at least three times the size of the model.",
                f"df -h {each.path}",
                is_wrong=each.free < _LEAST_DISK,
            )


def check_shared_memory(facts: Facts) -> Iterator[Finding]:
    """Little shared memory, as containers have by default."""
    for each in facts.disks:
        if each.name == "shared memory" and each.total < _LEAST_SHARED:
            yield Finding(
                f"{each.path} has {each.total / 1e6:.0f} MB in all, so a Loader with "
                "workers= may die of a bus error; a container gets more when it starts.",
                "docker run --shm-size=8g ...",
                is_wrong=False,
            )


def check_memory(facts: Facts) -> Iterator[Finding]:
    """Little memory."""
    if facts.memory_free is not None and facts.memory_free < _LEAST_MEMORY:
        yield Finding(
            f"{facts.memory_free / _GB:.1f} GB of memory are free; compiling a step may "
            "take more.",
            "ps -eo rss,pid,comm --sort=-rss | head",
        )


def check_cores(facts: Facts) -> Iterator[Finding]:
    """Fewer cores than the machine has."""
    if facts.quota is not None and facts.quota < facts.usable_cores:
        yield Finding(
            f"This container may keep {facts.quota:g} cores busy, and programs see "
            f"{facts.usable_cores}, for each of which a CPU device is simulated.",
            f"export JAX_NUM_CPU_DEVICES={max(int(facts.quota), 1)}",
            is_wrong=False,
        )
    elif facts.usable_cores < facts.cores:
        yield Finding(
            f"This process may run on {facts.usable_cores} of {facts.cores} cores.",
            "taskset -cp $$",
            is_wrong=False,
        )


def check_hostname(facts: Facts) -> Iterator[Finding]:
    """A name that other processes cannot reach."""
    if not facts.resolves:
        yield Finding(
            f"The name of this machine, {facts.hostname}, has no address, so processes of "
            "a cluster wait for each other in vain.",
            f'echo "127.0.1.1 {facts.hostname}" | sudo tee -a /etc/hosts',
            is_wrong="SLURM_JOB_ID" in facts.environment,
        )


def check_processes(facts: Facts) -> Iterator[Finding]:
    """Variables of several processes that contradict each other."""
    given = {
        name: facts.environment[name] for name in _PROCESSES if name in facts.environment
    }
    command = f"unset {' '.join(_PROCESSES)}"
    if 0 < len(given) < 3 and given.get("EQXSHARD_PROCESSES") != "1":
        missing = [name for name in _PROCESSES if name not in given]
        verb = "is" if len(given) == 1 else "are"
        yield Finding(
            f"{' and '.join(given)} {verb} set, but not {' and '.join(missing)}: a program "
            "needs all three or none.",
            command,
        )
    elif len(given) == 3:
        count, number = given["EQXSHARD_PROCESSES"], given["EQXSHARD_PROCESS"]
        if not (count.isdigit() and number.isdigit() and int(number) < int(count)):
            yield Finding(
                f"EQXSHARD_PROCESS={number} is not one of EQXSHARD_PROCESSES={count}, "
                "counted from 0.",
                command,
            )


def check_slurm(facts: Facts) -> Iterator[Finding]:
    """A job of several tasks whose program is not started by srun."""
    tasks = facts.environment.get("SLURM_NTASKS", "1")
    if tasks not in ("", "1") and "SLURM_STEP_ID" not in facts.environment:
        yield Finding(
            f"This is a SLURM job of {tasks} tasks, but not one of its steps: a program "
            "started here is alone.",
            "srun python -m eqxshard doctor",
            is_wrong=False,
        )
