import json

import numpy as np
import pytest
from hostile_files import deep_json

import eqxshard
from eqxshard.checkpoint._manifest import describe, parse_description


def test_checkpoints_describe_themselves(checkpoints):
    folder, _ = checkpoints
    checkpointer = eqxshard.Checkpointer(folder)
    assert checkpointer.steps() == [4, 8, 10]
    described = checkpointer.description(10)
    assert described == json.loads((folder / "10" / "description.json").read_text())
    assert described["step"] == 10
    assert described["leaves"]["model.first.weight"] == {
        "shape": [32, 8],
        "dtype": "float32",
        "spec": [],
    }
    assert described["mesh"]["data"] == 8
    assert described["loader"]["step"] == 10
    assert described["metrics"]["train/loss"] > 0


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"step": 1}', deep_json(), b"\xff"])
def test_other_text_is_refused(text):
    with pytest.raises(ValueError, match=r"^description.json was not written by eqxshard"):
        parse_description(text)


@pytest.mark.parametrize(
    "wrong",
    [
        {"step": "x"},
        {"metrics": {"loss": "x"}},
        {"loader": [1]},
        {"mesh": {"data": None}},
        {"leaves": []},
        {"leaves": {"x": {"shape": [1], "dtype": "no"}}},
        {"leaves": {"x": {"shape": [2], "dtype": "key<fry>", "impl": "no"}}},
        {"callbacks": 1},
    ],
    ids=json.dumps,
)
def test_a_description_of_other_types_is_refused(wrong):
    plain = describe(1, {}, None, {}, {})
    assert parse_description(json.dumps(plain)) == plain
    with pytest.raises(ValueError, match="was not written by eqxshard"):
        parse_description(json.dumps(plain | wrong))


def test_what_is_not_on_devices_is_named():
    with pytest.raises(TypeError, match=r"a\.b is a ndarray, not an array on devices; pl"):
        describe(1, {"a.b": np.ones(2)}, None, {}, {})
