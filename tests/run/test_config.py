import sys

import pytest

from eqxshard.run import RunConfig


@pytest.mark.parametrize(
    "options, message",
    [
        *(
            ({name: value}, f"^{flag} {value} is too small; use 1 or more")
            for name, flag in (
                ("epochs", "--epochs"),
                ("steps", "--steps"),
                ("batch_size", "--batch-size"),
                ("devices", "--devices"),
                ("save_every", "--save-every"),
            )
            for value in (0, -3)
        ),
        ({"evaluate_every": 0}, "^--evaluate-every 0 is too small; use 1 or more"),
        ({"log_every": 0}, "^--log-every 0 is too small; use 1 or more"),
        ({"hang_seconds": 0.0}, "^--hang-seconds 0.0 is too small; use more than"),
        ({"epochs": 2, "steps": 9}, "--epochs 2 and --steps 9 contradict each other; give"),
        ({"seed": -1}, "--seed -1 is out of range; use"),
        ({"seed": 2**32}, "--seed 4294967296 is out of range; use"),
        ({"output": ""}, "--output is empty; give a folder, or leave the option out"),
        ({"resume": "maybe"}, "--resume maybe is unknown; use no, yes or auto"),
        (
            {"track": ("tensorboard",)},
            "'tensorboard' is not a service that .*; use one of wandb, ",
        ),
        ({"profile": "9:5"}, "'9:5' are not steps to profile; write START:STOP"),
        ({"mesh": ""}, "the mesh '' names the axis ''"),
        ({"plan": "h200"}, "--plan h200 is not a number and a kind of devices; write"),
        ({"plan": "8xcpu", "devices": 8}, "--plan 8xcpu and --devices 8 contradict each"),
        (
            {"plan": "8xcpu", "plan_file": "plan"},
            "cannot be written as 'plan'; give a name",
        ),
        ({"plan_file": "plan.json"}, "--plan-file plan.json is the file of a plan; give"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message, unannotated):
    with pytest.raises(ValueError, match=message):
        RunConfig(**options).check()


def test_a_service_that_is_not_installed_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"install it with `pip install 'eqxshard\[wandb"):
        RunConfig(track=("wandb",)).check()


def test_one_name_of_a_service_is_no_tuple_of_names(unannotated):
    with pytest.raises(
        TypeError, match=r"^track='wandb' is a string; .* track=\('wandb',\)"
    ):
        RunConfig(track="wandb").check()  # pyright: ignore[reportArgumentType]
