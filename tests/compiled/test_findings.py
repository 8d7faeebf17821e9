import optax
import pytest

import eqxshard
from eqxshard.compiled._findings import Finding, lint_levels, report
from eqxshard.inspect import LintWarning

FIRST = Finding("constant", None, "model.py:12", "a constant. Make it a field.")
SECOND = Finding("whole", "head.weight", None, "head.weight is whole. Pad it.")


def test_a_finding_of_an_unknown_kind_is_refused_when_it_is_made(unannotated):
    with pytest.raises(ValueError, match="'wide' is not a kind of finding"):
        Finding("wide", None, None, "")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "lint, text",
    [
        (False, "lint=False: False is not a level; use 'warn', 'error' or 'off', or a ma"),
        ("loud", "lint='loud': 'loud' is not a level"),
        ({"constant": "loud"}, "'loud' is not a level"),
        ({"constants": "off"}, "'constants' is not a kind of finding; did you mean 'cons"),
    ],
)
def test_levels_that_do_not_exist(lint, text, unannotated):
    with pytest.raises(ValueError, match="lint=") as error:
        eqxshard.make_train_step(lambda *_: 0, optax.sgd(1.0), lint=lint)
    assert text in str(error.value)


def test_a_warning_has_the_line_the_remedy_and_how_to_end_it():
    with pytest.warns(LintWarning) as warned:
        report([FIRST, SECOND], lint_levels("warn"), "the train step of f")
    texts = [str(each.message) for each in warned]
    assert texts == [
        "the train step of f, constant: model.py:12: a constant. Make it a field. "
        "(If this is intended, silence it with lint={'constant': 'off'}.)",
        "the train step of f, whole: head.weight is whole. Pad it. "
        "(If this is intended, silence it with lint={'whole': 'off'}.)",
    ]


def test_an_error_comes_before_warnings_and_many_are_shortened():
    findings = [FIRST, *[Finding("whole", f"a{i}", None, f"a{i}.") for i in range(9)]]
    with pytest.raises(ValueError, match=r"whole: a0\. a1\. a2\. a3\. and 5 more \(If "):
        report(findings, lint_levels({"whole": "error"}), "it")
    report(findings, lint_levels("off"), "it")
