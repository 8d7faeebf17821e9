import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import Model, lenient, make_loader, make_mesh, source

import eqxshard


@pytest.fixture(scope="module")
def model():
    return eqxshard.init_state(
        Model,
        lenient(optax.sgd(0.1)),
        key=jax.random.key(0),
        mesh=make_mesh(),
        rule=eqxshard.replicate(),
    ).model


@pytest.fixture(scope="module")
def eval_step():
    def metric_fn(model, batch):
        ones = jnp.ones(batch["index"].shape, "float32")
        return {"index": batch["index"], "ones": ones}

    return eqxshard.make_eval_step(metric_fn, mesh=make_mesh(), rule=eqxshard.replicate())


@pytest.mark.parametrize("placement", ["host", "device"])
@pytest.mark.parametrize("batch_size", [8, 32, 96, 104])
def test_an_evaluation_counts_each_example_once(model, eval_step, batch_size, placement):
    loader = make_loader(batch_size=batch_size, placement=placement)
    loader.seek(1)
    means = eqxshard.evaluate(model, eval_step, loader)
    mean = np.mean(np.arange(len(source())))
    assert means == {"index": pytest.approx(mean), "ones": pytest.approx(1.0)}


def metrics_of(model, batch):
    return {"ones": batch["index"]}


#: Arguments of `evaluate` by what is wrong with them, in terms of those that are right.
REFUSED = {
    r"EvalStep, Model, Loader; write evaluate\(": lambda m, s, x: (s, m, x),
    "Model, Loader, EvalStep; write": lambda m, s, x: (m, x, s),
    "Model, dict, Loader; write": lambda m, s, x: (m, {}, x),
    r"returned a dict.*make_eval_step\(metrics_of\)": lambda m, s, x: (m, metrics_of, x),
}


@pytest.mark.parametrize("says", REFUSED)
def test_other_arguments_are_refused(model, eval_step, says, unannotated):
    with pytest.raises(TypeError, match=says):
        eqxshard.evaluate(*REFUSED[says](model, eval_step, make_loader()))


def test_an_evaluation_needs_a_length():
    class Endless:
        def seek(self, step):
            pass

        def __iter__(self):
            yield from make_loader()

    with pytest.raises(ValueError, match="needs a loader with an end, and this Endless"):
        eqxshard.evaluate(None, lambda model, batch: batch, Endless())


def loss_and_metric(model, batch):
    return {"loss": batch["x"], "plain": batch["x"]}


@pytest.mark.parametrize("placement", ["host", "device"])
def test_the_loss_of_an_evaluation_is_the_mean_by_loss_weight(model, placement):
    """Over all batches at once, the last of which is padded, as a train step reports it."""
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=44), rng.uniform(0.1, 3, 44)
    # Batches of very different weight, so that a mean of their means is another number.
    x, weight = np.float32(x + np.arange(44)), np.float32(weight * np.arange(44))
    source = eqxshard.data.ArraySource({"x": x, "__loss_weight__": weight})
    loader = eqxshard.Loader(
        source, batch_size=16, mesh=make_mesh(), shuffle=False, placement=placement
    )
    means = eqxshard.evaluate(model, eqxshard.make_eval_step(loss_and_metric), loader)
    assert means["loss"] == pytest.approx(np.average(x, weights=weight), rel=1e-5)
    assert means["plain"] == pytest.approx(x.mean(), rel=1e-5)
