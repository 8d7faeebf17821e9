"""The job file on a real SLURM: two nodes on this machine, which the tests start."""

import re
from pathlib import Path

import pytest
from cluster_helpers import (
    LOG_EVERY,
    SAVE_EVERY,
    SETTINGS,
    STEPS,
    TRAINING,
    assert_same,
    reports,
    wait_for,
)
from slurm_cluster import NODES, Slurm, why_not

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
#: A task on each node, instead of four.
SMALL = ["--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=1"]
SAVED = r"stopped after step (\d+); the checkpoint of step \1 is saved"


@pytest.fixture(scope="module")
def slurm():
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    cluster = Slurm()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def folder(tmp_path):
    """The folder to submit jobs from: like a checkout, with their runs and logs."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    return tmp_path


def submit(slurm, folder, *options, arguments=TRAINING):
    words = [*SMALL, *options, "recipes/cluster/slurm.sbatch", *arguments]
    return slurm.run("sbatch", "--parsable", *words, **SETTINGS, PWD=str(folder)).strip()


def assert_done(slurm, job, folder):
    facts = slurm.wait_for_end(job)
    assert facts["JobState"] == "COMPLETED", log(folder)


def log(folder):
    return "".join(path.read_text() for path in sorted(folder.glob("*.log")))


def wait_for_training(slurm, job, run, step=LOG_EVERY):
    def trains():
        assert slurm.state(job)["JobState"] in ("PENDING", "RUNNING"), log(run.parents[1])
        path = run / "metrics.jsonl"
        return path.exists() and f'"step": {step},' in path.read_text()

    wait_for(f"step {step} of job {job}", trains)


def wait_for_checkpoint(run):
    done = "checkpoints/*/checksums.txt"
    wait_for("a checkpoint", lambda: any(run.glob(done)))


def test_a_job_goes_on_after_a_node_is_lost(slurm, folder, one_process):
    job = submit(slurm, folder)
    run = folder / "runs" / f"eqxshard-{job}"
    wait_for_training(slurm, job, run)
    wait_for_checkpoint(run)
    slurm.kill_node(NODES[1])
    try:
        wait_for("SLURM to miss the node", lambda: slurm.state(job)["Restarts"] == "1")
    finally:
        slurm.start_node(NODES[1])
        slurm.wait_for_nodes()
    slurm.start_now(job)
    assert_done(slurm, job, folder)
    (step,) = re.findall(r"resuming from step (\d+)\.", log(folder))
    assert int(step) >= SAVE_EVERY
    assert_same(reports(run), one_process)


def test_a_job_at_its_time_limit_saves_and_goes_on(slurm, folder):
    # It must last until SLURM notices, which looks every 30 seconds.
    job = submit(slurm, folder, "--time=60", arguments=[*TRAINING, "--steps=1000000"])
    wait_for_training(slurm, job, folder / "runs" / f"eqxshard-{job}")
    # The job file asks for a signal two minutes before.
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=2")
    wait_for("the job's own requeue", lambda: slurm.state(job)["Restarts"] == "1")
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    slurm.start_now(job)

    def goes_on():
        assert slurm.state(job)["JobState"] in ("PENDING", "RUNNING"), log(folder)
        return "resuming from step" in log(folder)

    wait_for("the job to go on", goes_on)
    slurm.run("scancel", job)
    (saved,) = re.findall(SAVED, log(folder))[:1]
    assert f"resuming from step {saved}." in log(folder)


def test_two_nodes_train_as_one_process_does_in_each_job_of_an_array(
    slurm, folder, one_process
):
    array = submit(slurm, folder, "--array=0-1")
    for index in range(2):
        assert_done(slurm, f"{array}_{index}", folder)
    assert " on 2 x cpu (data=2)\n" in log(folder)
    runs = [folder / "runs" / f"eqxshard-{array}_{index}" for index in range(2)]
    first, second = map(reports, runs)
    assert_same(first, one_process)
    # The index is the seed.
    assert first.keys() == second.keys() and first[STEPS] != second[STEPS]
