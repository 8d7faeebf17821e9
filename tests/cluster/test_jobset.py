"""The JobSet, against the schemas that JobSet and Kubernetes publish."""

import copy
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.cluster

JOBSET = Path(__file__).parents[2] / "recipes" / "cluster" / "jobset.yaml"


@pytest.fixture
def jobset():
    return yaml.safe_load(JOBSET.read_text())


def is_known(jobset):
    """True if a client made from JobSet's schema keeps all fields: it drops others."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    return models.JobsetV1alpha2JobSet.from_dict(jobset).to_dict() == jobset


def validate_job(jobset):
    validator = pytest.importorskip("kubernetes_validate")
    (job,) = jobset["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job"} | job["template"]
    validator.validate(job, validator.latest_version(), strict=True)


def test_it_is_a_jobset(jobset):
    assert is_known(jobset)
    jobset["spec"]["failurePolicy"]["maxRestart"] = 1
    assert not is_known(jobset)


def test_its_jobs_are_jobs_of_kubernetes(jobset):
    validate_job(jobset)
    wrong = copy.deepcopy(jobset)
    (job,) = wrong["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    container["volumeMount"] = container.pop("volumeMounts")
    with pytest.raises(Exception, match="'volumeMount' was unexpected"):
        validate_job(wrong)
