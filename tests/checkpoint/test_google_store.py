"""Checkpoints in Google's store, by a server of its protocol; see `nox -s stores`."""

import importlib.util
import json
import os
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from store_helpers import (
    arrays_of,
    kill_while_saving,
    linked,
    save_and_resume,
)

# Not imported yet: gcsfs reads the environment then.
for package in ("gcp_storage_emulator", "gcsfs"):
    if importlib.util.find_spec(package) is None:
        reason = f"{package} is not installed; run nox -s stores"
        pytest.skip(reason, allow_module_level=True)
pytestmark = [
    pytest.mark.slow,
    # The server's client warns in its own threads.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def link():
    """A way to a server of Google Cloud Storage, which asks for no credentials."""
    server = Path(__file__).parents[1] / "google_server.py"
    options = ("start", "--host=127.0.0.1", "--in-memory", "--quiet")
    command = [sys.executable, str(server), *options]
    with linked(command) as link, pytest.MonkeyPatch.context() as m:
        address = f"http://127.0.0.1:{link.port}"
        m.setenv("TENSORSTORE_GCS_HTTP_URL", address)
        m.setenv("STORAGE_EMULATOR_HOST", address)
        # Otherwise gcsfs would ask Google itself for the kind of bucket.
        m.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        yield link


@pytest.fixture
def bucket(link):
    """A new bucket."""
    name = f"bucket-{time.monotonic_ns()}"
    url = f"{os.environ['STORAGE_EMULATOR_HOST']}/storage/v1/b?project=some"
    content = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps({"name": name}).encode(), content)
    urllib.request.urlopen(request).close()
    return f"gs://{name}"


def test_a_run_saves_and_resumes_on_any_mesh(bucket, train_step, tmp_path):
    save_and_resume(f"{bucket}/runs/one", train_step, tmp_path)


def test_processes_killed_while_they_save(bucket, tmp_path):
    assert arrays_of(kill_while_saving(bucket, tmp_path))
