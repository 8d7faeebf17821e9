import sys
from typing import get_type_hints

import pytest

from eqxshard.run import RunConfig, default


@pytest.mark.parametrize(
    "options, message",
    [
        *(
            (
                {name: value},
                rf"^--{name.replace('_', '-')} {value} is too small; use 1 or m",
            )
            for name in ("epochs", "steps", "batch_size", "devices", "save_every")
            for value in (0, -3)
        ),
        ({"evaluate_every": 0}, "^--evaluate-every 0 is too small; use 1 or more"),
        ({"log_every": 0}, "^--log-every 0 is too small; use 1 or more"),
        ({"hang_seconds": 0.0}, "^--hang-seconds 0.0 is too small; use more than 0, and"),
        ({"epochs": 2, "steps": 9}, "--epochs 2 and --steps 9 contradict each other; give"),
        ({"seed": -1}, r"--seed -1 must be between 0 and 2\*\*32 - 1"),
        ({"seed": 2**32}, "--seed 4294967296 must be between"),
        ({"output": ""}, "--output is empty; give a folder, or leave the option out"),
        ({"resume": "maybe"}, "--resume maybe is not no, yes or auto"),
        (
            {"profile": "9:5"},
            "'9:5' are not steps to profile; write START:STOP, such as 10",
        ),
        ({"mesh": ""}, "the mesh '' names the axis ''"),
        ({"mesh": "dta=2"}, "did you mean 'data'"),
        ({"track": ("wandb", "wandb")}, "--track names wandb twice; name it once"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message, unannotated):
    with pytest.raises(ValueError, match=message):
        RunConfig(**options).check()


def test_a_service_that_is_not_installed_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError) as error:
        RunConfig(track=("wandb",)).check()
    assert str(error.value) == (
        "--track wandb needs the package wandb, which is not installed; install it with "
        "`pip install 'eqxshard[wandb]'`."
    )


def test_the_defaults_and_whole_ranges_are_accepted():
    RunConfig().check()
    accepted: list[dict] = [
        {"seed": 2**32 - 1},
        {"epochs": 1},
        {"steps": 1},
        {"mesh": "fsdp=-1"},
        {"profile": "2:2"},
    ]
    for options in accepted:
        RunConfig(**options).check()


def test_every_option_has_a_type_that_the_help_can_show():
    assert get_type_hints(RunConfig).keys() == vars(RunConfig()).keys()
    shown = default("0.01", "RATE")
    assert (shown.metavar, shown.help_behavior_hint) == ("RATE", "(default: 0.01)")
