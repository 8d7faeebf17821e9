"""The recipes of the gallery, shortened: they learn, draw, and refuse mistakes."""

import re
import sys

import jax
import numpy as np
import optax
import pytest
from garments import Images
from helpers import lenient
from process_helpers import finished
from run_helpers import PNG, ROOT, call, environment, read_lines
from safetensors.numpy import load_file

import eqxshard

GALLERY = ROOT / "recipes" / "gallery"
synthetic_fashion = eqxshard.data.synthetic_fashion


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    """Few generated garments, and a folder of their own for runs."""

    def load(data="auto", *, data_dir=None):
        return synthetic_fashion("train", size=256), synthetic_fashion("test", size=48)

    monkeypatch.setattr(eqxshard.data, "load_fashion_mnist", load)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def main(monkeypatch, capsys):
    """Runs a recipe in this process; returns its status, stdout and stderr."""
    return lambda name, *options: call(
        capsys, monkeypatch, GALLERY / f"{name}.py", *options
    )


@pytest.mark.parametrize(
    "name, options, sentence",
    [
        ("ensemble", "--learning-rate 0", "--learning-rate 0.0 is not positive and finite"),
        ("lora", "--rank 0", "--rank 0 is too small; use 1 or more"),
        ("resnet", "--cifar nowhere", "nowhere/data_batch_1.bin does not exist; give"),
    ],
)
def test_a_mistake_is_one_line(main, name, options, sentence):
    status, out, err = main(name, "--devices", 1, *options.split())
    assert (status, out) == (2, "") and err.count("\n") == 1, err
    assert err.startswith("error: ") and sentence in err


# Data


def test_cifar_is_read_from_its_binary_files(tmp_path):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (10, 32, 32, 3), dtype=np.uint8)
    labels = np.arange(10, dtype=np.uint8)
    planes = images.transpose(0, 3, 1, 2).reshape(10, -1)
    records = np.concatenate([labels[:, None], planes], axis=1)
    for number in range(5):
        part = records[2 * number : 2 * number + 2]
        part.tofile(tmp_path / f"data_batch_{number + 1}.bin")
    records[:3].tofile(tmp_path / "test_batch.bin")
    cifar = Images(cifar=str(tmp_path))
    train, test = cifar.load(tests=2)
    assert (len(train), len(test), cifar.names[0]) == (10, 2, "plane")
    found = train.gather(np.arange(10))
    np.testing.assert_array_equal(found["image"], images)
    np.testing.assert_array_equal(found["label"], labels)
    (tmp_path / "test_batch.bin").write_bytes(bytes(99))
    with pytest.raises(ValueError, match="has files that are cut off; download"):
        cifar.load()


# Runs

#: Constants at the top of recipes that are smaller in tests.
SMALL = {
    "resnet": {"WIDTHS": "(8, 8)"},
    "vit": {"WIDTH": "16", "HEADS": "2", "DEPTH": "2"},
    "diffusion": {"WIDTH": "16", "DEPTH": "2", "ROWS": "1", "STEPS": "3"},
    "neural_ode": {"TIMES": "np.linspace(0, 2, 12, dtype=np.float32)", "WINDOW": "4"},
    "gan": {"LATENT, WIDTH": "8, 4"},
    "reinforce": {"TIME": "60"},
}
#: The steps of a short run, a metric that it reports, the pictures that it draws, and the
#: bounds of that metric's mean in the second half, divided by that in the first.
RUNS = {
    "resnet": (16, "loss", ["guesses"], (0, 0.99)),
    "vit": (16, "loss", ["guesses", "augmented"], (0, 0.99)),
    "diffusion": (20, "loss", ["drawn"], (0, 0.95)),
    "neural_ode": (20, "loss", ["paths"], (0, 0.9)),
    "rnn": (12, "loss", ["rows"], (0, 0.99)),
    "lora": (20, "loss", ["before", "after"], (0, 0.9)),
    # Two models that compete need not get better.
    "gan": (4, "generator/loss", ["drawn"], (0.5, 2)),
    # A pole stands longer.
    "reinforce": (16, "length", ["pole"], (1.2, 5)),
}
SHORT = "--batch-size 32 --save-every 99 --evaluate-every 99"


@pytest.fixture
def short(capsys, monkeypatch, tmp_path):
    """Runs a recipe with smaller constants, on two devices, into the folder `run`."""

    def run(name, options):
        text = (GALLERY / f"{name}.py").read_text()
        for constant, value in SMALL.get(name, {}).items():
            text, found = re.subn(rf"(?m)^{constant} = .*$", f"{constant} = {value}", text)
            assert found == 1, constant
        script = tmp_path / f"{name}.py"
        script.write_text(text)
        options = [*options.split(), "--devices", 2, "--output", "run"]
        status, out, err = call(capsys, monkeypatch, script, *options)
        assert status == 0, err
        return tmp_path / "run", out

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_recipe_learns_and_draws(short, name):
    if name == "neural_ode":
        pytest.importorskip("diffrax", reason="diffrax is not installed; run nox -s slow")
    steps, reported, pictures, (least, most) = RUNS[name]
    # Every report draws all curves, which takes longer than these steps.
    folder, out = short(name, f"{SHORT} --steps {steps} --log-every {steps // 2}")
    assert re.search(r"on 2 x cpu \((data|fsdp)=2\)", out.splitlines()[-1]), out
    lines = (line.get(f"train/{reported}") for line in read_lines(folder))
    found = [value for value in lines if value is not None]
    assert least < found[-1] / found[0] < most, found
    for picture in pictures:
        assert (folder / f"{picture}.png").read_bytes().startswith(PNG)
    if name == "lora":
        # The adapters are saved alone.
        saved = load_file(folder / "adapters.safetensors")
        names = {f"layers.{layer}.{part}" for layer in range(3) for part in "ab"}
        assert saved.keys() == names and all(map(np.any, saved.values()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lora", "neural_ode"])
def test_shapes_and_data_leave_devices_to_train(name, tmp_path):
    """These recipes compute before `train`, which simulates the devices."""
    options = f"{SHORT} --steps 1 --devices 2 --output run".split()
    if name == "lora":
        import lora as recipe

        eqxshard.save_weights("base.safetensors", recipe.make_base(jax.random.key(0)))
        options += ["--weights", "base.safetensors", "--data", "synthetic"]
    else:
        pytest.importorskip("diffrax", reason="diffrax is not installed; run nox -s slow")
    script = [sys.executable, GALLERY / f"{name}.py", *options]
    status, out, err = finished(script, env=environment())
    assert status == 0, err
    assert out.splitlines()[-1].endswith(" on 2 x cpu (data=2)"), out


@pytest.mark.slow
@pytest.mark.usefixtures("as_scripts_run")
def test_members_of_the_ensemble_exchange_nothing_but_their_loss():
    import ensemble as recipe

    mesh = eqxshard.make_mesh(data=1, tensor=8)
    optim = lenient(optax.adam(1e-3))
    state = eqxshard.init_state(
        recipe.make_ensemble, optim, key=jax.random.key(0), mesh=mesh, rule=recipe.RULE
    )
    weight = state.model.layers[1].weight
    assert weight.shape == (16, 64, 64)
    assert weight.addressable_shards[0].data.shape == (2, 64, 64)
    step = eqxshard.make_train_step(recipe.loss_fn, optim)
    batch = recipe.waves(32, 0).gather(np.arange(32))
    sent = eqxshard.testing.collectives(step.lower(state, batch).compile())
    # A member's parameters are 17,000 bytes.
    assert sum(sent.bytes.values()) < 1000, str(sent)
