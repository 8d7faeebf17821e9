import pytest

from eqxshard.debug._doctor._check_machine import (
    check_cores,
    check_disks,
    check_folders,
    check_hostname,
    check_memory,
    check_processes,
    check_shared_memory,
    check_slurm,
)
from eqxshard.debug._doctor._facts import Disk, Facts, Folder

GB = 10**9


def found(check, **facts):
    """Of each finding of a check its sentence, its command and whether it is wrong."""
    return [(x.sentence, x.command, x.is_wrong) for x in check(Facts(**facts))]


@pytest.mark.parametrize(
    "changes, words, command, is_wrong",
    [
        ({"is_foreign": True}, "another user", "export JAX_COMPILATION_CACHE_DIR=", True),
        ({"is_open": True}, "All users may write", "chmod o-w /c", True),
        ({"is_writable": False}, "cannot be written to", "chmod u+rwx /c", True),
        ({"nbytes": 30 * GB}, "has 30 GB.", "rm -r /c", False),
    ],
)
def test_the_compilation_cache(changes, words, command, is_wrong):
    folders = (Folder("compilation cache", "/c", **changes),)
    ((sentence, mends, wrong),) = found(check_folders, folders=folders)
    assert words in sentence and mends.startswith(command) and wrong is is_wrong


def test_folders_that_are_as_they_should_be():
    cache, data = Folder("compilation cache", "/c", nbytes=5), Folder("data", "/d")
    later = Folder("compilation cache", "/c", exists=False, is_writable=False)
    assert found(check_folders, folders=(cache, data, later)) == []
    # Data are only read, and any folder may be large.
    shared = Folder("data", "/d", is_writable=False, is_foreign=True, nbytes=99 * GB)
    assert found(check_folders, folders=(shared,)) == []
    assert found(check_folders, folders=(Folder("data", "/d", exists=False),)) == [
        ("EQXSHARD_DATA_DIR is /d, which does not exist.", "mkdir -p /d", True)
    ]


def test_disks():
    full = Disk("current folder", "/a", free=GB // 2, total=100 * GB)
    some = Disk("temporary folder", "/b", free=5 * GB, total=100 * GB)
    room = Disk("current folder", "/c", free=50 * GB, total=100 * GB)
    first, second = found(check_disks, disks=(full, some, room))
    assert first[0].startswith("0.5 GB are free for the current folder, /a;")
    assert first[1:] == ("df -h /a", True) and second[1:] == ("df -h /b", False)


def test_shared_memory():
    small = Disk("shared memory", "/dev/shm", free=64_000_000, total=64_000_000)
    ((sentence, command, is_wrong),) = found(check_shared_memory, disks=(small,))
    assert sentence.startswith("/dev/shm has 64 MB in all, so a Loader with workers=")
    assert (command, is_wrong) == ("docker run --shm-size=8g ...", False)
    large = Disk("shared memory", "/dev/shm", free=8 * GB, total=8 * GB)
    assert found(check_shared_memory, disks=(large,)) == []
    assert found(check_disks, disks=(small,)) == []


def test_memory():
    ((sentence, _, is_wrong),) = found(check_memory, memory=GB, memory_free=GB // 5)
    assert sentence.startswith("0.2 GB of memory are free;") and is_wrong
    assert found(check_memory, memory=8 * GB, memory_free=4 * GB) == []
    assert found(check_memory) == []


def test_cores():
    ((sentence, command, _),) = found(check_cores, cores=64, usable_cores=64, quota=2.5)
    assert sentence.startswith(
        "This container may keep 2.5 cores busy, and programs see 64"
    )
    assert command == "export JAX_NUM_CPU_DEVICES=2"
    ((sentence, command, _),) = found(check_cores, cores=64, usable_cores=8)
    assert sentence == "This process may run on 8 of 64 cores."
    assert found(check_cores, cores=8, usable_cores=8, quota=8.0) == []


def test_a_name_without_an_address():
    ((_, command, is_wrong),) = found(check_hostname, hostname="node-1", resolves=False)
    assert command == 'echo "127.0.1.1 node-1" | sudo tee -a /etc/hosts' and not is_wrong
    job = {"SLURM_JOB_ID": "7"}
    ((_, _, is_wrong),) = found(check_hostname, resolves=False, environment=job)
    assert is_wrong
    assert found(check_hostname) == []


ADDRESS = {"EQXSHARD_ADDRESS": "a:1"}


@pytest.mark.parametrize(
    "environment, words",
    [
        ({}, None),
        (ADDRESS | {"EQXSHARD_PROCESSES": "2", "EQXSHARD_PROCESS": "1"}, None),
        ({"EQXSHARD_PROCESSES": "1"}, None),
        (ADDRESS, "EQXSHARD_ADDRESS is set, but not EQXSHARD_PROCESSES and EQXSHARD_PROC"),
        (
            ADDRESS | {"EQXSHARD_PROCESS": "0"},
            "EQXSHARD_ADDRESS and EQXSHARD_PROCESS are set, but not EQXSHARD_PROCESSES:",
        ),
        (
            ADDRESS | {"EQXSHARD_PROCESSES": "2", "EQXSHARD_PROCESS": "2"},
            "EQXSHARD_PROCESS=2 is not one of EQXSHARD_PROCESSES=2, counted from 0.",
        ),
    ],
)
def test_variables_of_several_processes(environment, words):
    said = [sentence for sentence, *_ in found(check_processes, environment=environment)]
    assert len(said) == (words is not None)
    assert all(words in sentence for sentence in said)


def test_a_job_without_srun():
    job = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}
    ((sentence, command, is_wrong),) = found(check_slurm, environment=job)
    assert sentence.startswith("This is a SLURM job of 4 tasks, but not one of its steps")
    assert command == "srun python -m eqxshard doctor" and not is_wrong
    assert found(check_slurm, environment=job | {"SLURM_STEP_ID": "0"}) == []
    assert found(check_slurm, environment={"SLURM_NTASKS": "1"}) == []
