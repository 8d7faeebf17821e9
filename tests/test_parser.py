"""What the command lines say about mistakes."""

import pytest

from eqxshard._parser import Parser


@pytest.mark.parametrize(
    "message, says",
    [
        ("--steps 0 is too few; use 1 or more.", "--steps 0 is too few; use 1 or more."),
        ("--steps is missing", "--steps is missing; see python -m x --help."),
    ],
)
def test_a_mistake_is_one_line_and_status_2(capsys, message, says):
    with pytest.raises(SystemExit) as error:
        Parser(prog="python -m x").error(message)
    assert error.value.code == 2
    assert capsys.readouterr() == ("", f"error: {says}\n")
