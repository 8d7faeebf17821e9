"""Plans in files: the same when read, and nothing else is read."""

import dataclasses
import json
import pickle

import pytest
from hostile_files import HostilePickle

import eqxshard
from eqxshard.planning._kept import keep_plan, read_plan


def test_a_plan_is_read_as_it_was_written(plan, tmp_path):
    finding = eqxshard.Finding("dtype", None, "model.py:3", "float64")
    plan = dataclasses.replace(plan, findings=eqxshard.Findings([finding]))
    file = tmp_path / "new" / "plan.json"
    keep_plan(plan, file)
    read = read_plan(file)
    assert read == plan and type(read and read.findings) is eqxshard.Findings
    assert [*file.parent.iterdir()] == [file]
    assert read_plan(tmp_path / "none") is None


def test_a_pickle_is_not_run(tmp_path, caplog):
    hostile = HostilePickle(tmp_path)
    (tmp_path / "plan.json").write_bytes(hostile.content)
    assert read_plan(tmp_path / "plan.json") is None
    assert "plan.json is not a plan of this version; it is compiled again." in caplog.text
    assert not hostile.has_run()
    # As the plans of earlier versions would have done.
    pickle.loads(hostile.content)
    assert hostile.has_run()


@pytest.mark.parametrize(
    "content",
    [
        *(1, [], {}, {"tuple": [1]}, {"dict": 3}, {"dict": [1]}, {"Path": [["args", []]]}),
        *({"Plan": [["target", 1]]}, {"Plan": [], "Target": []}, {"__import__": ["os"]}),
    ],
)
def test_other_json_is_no_plan(tmp_path, caplog, content):
    (tmp_path / "plan.json").write_text(json.dumps(content))
    assert read_plan(tmp_path / "plan.json") is None
    assert "it is compiled again" in caplog.text
