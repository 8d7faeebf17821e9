import re
from pathlib import Path
from typing import get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lint_helpers import BATCH, OPTIM, lint, make_state, square_losses

import eqxshard
from eqxshard.compiled._findings import Kind, StepKind
from eqxshard.inspect import Finding

GUIDE = Path(__file__).parents[2] / "docs/pages/guide/lint.md"


def test_findings_print_as_lines():
    def loss_fn(model, batch, key):
        table = np.ones((512, 512), np.float32)
        return (
            square_losses(model, batch, key)
            + table.sum()
            + (table * batch["x"][:, :1]).sum(-1)
        )

    findings = lint(loss_fn=loss_fn, batch=BATCH, fsdp=8)
    (finding,) = findings
    assert isinstance(finding, Finding)
    assert str(findings) == f"constant: {finding.line}: {finding.message}"


def test_the_docstring_and_the_guide_list_all_kinds():
    """The guide lists those of steps, and adds that of other functions in a paragraph."""
    text, _, _ = (eqxshard.lint.__doc__ or "").partition("**Arguments:**")
    assert {*re.findall("^ *- `(.+?)`:", text, re.M)} == {*get_args(Kind)}
    guide = GUIDE.read_text()
    assert {*re.findall("^- `(.+?)`", guide, re.M)} == {*get_args(StepKind)}
    assert "one kind more, `all-layers`" in guide


def test_eval_steps_take_a_model():
    state = make_state(fsdp=8)
    step = eqxshard.make_eval_step(lambda m, b: {"y": jax.vmap(m)(b["x"]).sum(-1)})
    findings = eqxshard.lint(step, state.model, BATCH)
    assert findings == eqxshard.lint(step, model=state.model, batch=BATCH) == ()
    assert str(findings) == "no findings"


def test_arguments_have_the_names_of_a_call():
    state, losses = make_state(fsdp=8), lambda m, b, k, extra: jax.vmap(m)(b["x"]).sum(-1)
    step = eqxshard.make_train_step(losses, OPTIM)
    assert eqxshard.lint(step, batch=BATCH, state=state, extra=np.ones(3)) == ()
    with pytest.raises(TypeError, match="missing a required argument: 'state'"):
        eqxshard.lint(step, model=state.model, batch=BATCH)
    eval_step = eqxshard.make_eval_step(lambda m, b: {})
    with pytest.raises(TypeError, match=r"give it state\.model"):
        eqxshard.lint(eval_step, state, BATCH)


def test_what_is_no_function_is_refused(unannotated):
    with pytest.raises(TypeError, match="is not a function"):
        eqxshard.lint(3)  # pyright: ignore[reportArgumentType]


def test_rows_gathered_for_a_loss_that_is_linear_in_the_outputs_are_found_and_kept_split():
    """The gradient of the outputs is a constant, and its rows are not known to be split."""

    def lint_outputs(split):
        def loss_fn(model, batch, key):
            return jnp.mean(split(jax.vmap(model)(batch["x"])), axis=-1)

        make_model = lambda key: eqx.nn.Linear(64, 256, key=key)  # noqa: E731
        return lint(make_model, loss_fn, BATCH, fsdp=8)

    (found,) = lint_outputs(lambda outputs: outputs)
    assert found.kind == "global-batch" and "eqxshard.constrain" in found.message
    rows = jax.P(("data", "fsdp"))
    assert [*lint_outputs(lambda outputs: eqxshard.constrain(outputs, rows))] == []
