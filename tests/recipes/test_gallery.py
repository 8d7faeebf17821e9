"""The recipes of the gallery, shortened: they learn, draw, and refuse mistakes."""

import re

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from example_helpers import execute
from garments import Images
from helpers import assert_equal, copied, lenient
from run_helpers import PNG, ROOT, call, read_lines
from safetensors.numpy import load_file

import eqxshard

GALLERY = ROOT / "recipes" / "gallery"
#: What is not a recipe: what several of them share.
SHARED = {"garments", "pictures"}
RECIPES = sorted({path.stem for path in GALLERY.glob("*.py")} - SHARED)
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


@pytest.fixture
def namespace(as_scripts_run):
    """What a recipe defines, as attributes, without running it."""
    return lambda name: execute(GALLERY / f"{name}.py")


def losses(folder, name="loss"):
    lines = read_lines(folder)
    return [line[f"train/{name}"] for line in lines if f"train/{name}" in line]


def test_every_recipe_is_on_the_page():
    page = (ROOT / "docs" / "pages" / "gallery.md").read_text()
    assert len(RECIPES) == 9
    for name in RECIPES:
        assert f"python recipes/gallery/{name}.py" in page
        assert f"[Source](gallery/{name}.md)" in page


@pytest.mark.parametrize(
    "name, options, sentence",
    [
        ("ensemble", "--learning-rate 0", "--learning-rate 0.0 is not positive and finite"),
        ("lora", "--rank 0", "--rank 0 is too small; use 1 or more"),
        ("resnet", "--cifar nowhere", "'nowhere/data_batch_1.bin'"),
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


def test_augmented_images_are_pieces_of_the_padded_ones(namespace):
    augment = namespace("vit").augment
    image = np.random.default_rng(0).integers(0, 256, (16, 28, 28), dtype=np.uint8)
    found = augment({"image": image}, np.random.default_rng(0).spawn(16))["image"]
    assert found.shape == image.shape and found.dtype == np.uint8
    mirrored = 0
    for before, after in zip(image, found):
        # The middle of the one is somewhere in the other.
        windows = np.lib.stride_tricks.sliding_window_view(after, (16, 16))
        hits = [(windows == x[6:22, 6:22]).all((2, 3)).sum() for x in two(before)]
        assert sorted(hits) == [0, 1]
        mirrored += hits[1]
    assert 0 < mirrored < 16


def two(image):
    """An image and its mirror image."""
    return image, image[:, ::-1]


# Runs

#: What is smaller in tests, of the constants at the top of a recipe.
SMALL = {
    "resnet": {"WIDTHS": "(8, 8)"},
    "vit": {"WIDTH": "16", "HEADS": "2", "DEPTH": "2"},
    "diffusion": {"WIDTH": "16", "DEPTH": "2", "ROWS": "1", "STEPS": "3"},
    "neural_ode": {"TIMES": "np.linspace(0, 2, 12, dtype=np.float32)", "WINDOW": "4"},
    "gan": {"LATENT, WIDTH": "8, 4"},
    "reinforce": {"TIME": "60"},
}
#: The steps of a short run, the pictures that it draws, and a factor: the mean loss of the
#: second half is less than that times the one of the first half.
RUNS = {
    "resnet": (16, ["guesses"], 0.99),
    "vit": (16, ["guesses", "augmented"], 0.99),
    "diffusion": (20, ["drawn"], 0.95),
    "neural_ode": (20, ["paths"], 0.9),
    "rnn": (12, ["rows"], 0.99),
    "lora": (20, ["before", "after"], 0.9),
}
SHORT = "--batch-size 32 --save-every 99 --evaluate-every 99"


@pytest.fixture
def short(capsys, monkeypatch, tmp_path):
    """Runs a recipe with smaller constants, on two devices, into the folder `run`."""

    def run(name, options, output="run"):
        text = (GALLERY / f"{name}.py").read_text()
        for constant, value in SMALL.get(name, {}).items():
            text, found = re.subn(rf"(?m)^{constant} = .*$", f"{constant} = {value}", text)
            assert found == 1, constant
        script = tmp_path / f"{name}.py"
        script.write_text(text)
        options = [*options.split(), "--devices", 2, "--output", output]
        status, out, err = call(capsys, monkeypatch, script, *options)
        assert status == 0, err
        return tmp_path / output, out

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_recipe_learns_and_draws(short, name, monkeypatch):
    if name == "neural_ode":
        pytest.importorskip("diffrax", reason="diffrax is not installed; run nox -s slow")
    steps, pictures, factor = RUNS[name]
    # Every report draws all curves, which takes longer than these steps.
    options = f"{SHORT} --steps {steps} --log-every {steps // 2}"
    runs = []
    train = eqxshard.train
    monkeypatch.setattr(
        eqxshard, "train", lambda *a, **k: runs.append(train(*a, **k)) or runs[-1]
    )
    folder, out = short(name, options)
    assert re.search(r"on 2 x cpu \((data|fsdp)=2\)", out.splitlines()[-1]), out
    found = losses(folder)
    assert found[-1] < factor * found[0], found
    for picture in pictures:
        assert (folder / f"{picture}.png").read_bytes().startswith(PNG)
    if name == "lora":
        check_adapters(folder, runs[-1].state.model)


def check_adapters(folder, model):
    """They are saved alone, and nothing else was trained."""
    saved = load_file(folder / "adapters.safetensors")
    sizes = {0: (256, 784), 1: (256, 256), 2: (10, 256)}
    shapes = {f"layers.{n}.a": (4, before) for n, (_, before) in sizes.items()}
    shapes |= {f"layers.{n}.b": (after, 4) for n, (after, _) in sizes.items()}
    assert {name: array.shape for name, array in saved.items()} == shapes
    assert all(np.any(array) for array in saved.values())
    base = load_file("runs/lora-base/base.safetensors")
    assert len(base) == 6
    for number, layer in enumerate(model.layers):
        for name in ("weight", "bias"):
            trained = getattr(layer.base, name)
            np.testing.assert_array_equal(trained, base[f"layers.{number}.{name}"])


@pytest.mark.slow
def test_a_pole_stands_longer(short):
    folder, _ = short("reinforce", f"{SHORT} --steps 16 --log-every 8")
    lengths = losses(folder, "length")
    assert lengths[0] < 40 and lengths[1] > 1.2 * lengths[0], lengths
    assert (folder / "pole.png").read_bytes().startswith(PNG)


@pytest.mark.slow
def test_a_gan_that_resumes_ends_as_one_that_did_not_stop(short, monkeypatch):
    states = []
    train = eqxshard.train

    def spy(*args, **options):
        run = train(*args, **options)
        states.append(copied(run.state))
        return run

    monkeypatch.setattr(eqxshard, "train", spy)
    short("gan", f"{SHORT} --steps 4", output="whole")
    short("gan", f"{SHORT} --steps 2")
    folder, out = short("gan", f"{SHORT} --steps 4 --resume")
    whole, part, resumed = states
    assert_equal(resumed, whole)
    assert "resuming from step 2." in out.splitlines()
    for name in ("generator", "discriminator"):
        assert int(whole[name].step) == 4
        before, after = (
            jax.tree.leaves(eqx.filter(state[name].model, eqx.is_array))
            for state in (part, whole)
        )
        assert all((x != y).any() for x, y in zip(before, after)), name
        assert len(losses(folder, f"{name}/loss")) > 0
    assert (folder / "drawn.png").read_bytes().startswith(PNG)


@pytest.mark.slow
def test_members_of_the_ensemble_exchange_nothing_but_their_loss(namespace):
    recipe = namespace("ensemble")
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
