"""Arrays of a file under other names, in other layouts, stacked or concatenated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_mesh, part
from safetensors.numpy import save_file

import eqxshard
from eqxshard.checkpoint import compare_weights

RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


#: Layers of a Llama and of a mixture of experts, by their names in files.
FILE = {
    "model.norm.weight": normal(8),
    **{f"model.layers.{i}.{x}_proj": normal(4, 8) for i in range(3) for x in "qkv"},
    **{f"model.layers.{i}.up.weight": normal(8, 16) for i in range(3)},
    **{f"moe.{i}.experts.{j}.w1": normal(4, 8) for i in range(2) for j in range(4)},
    **{f"odd.{i}": normal(8 if i < 3 else 16) for i in range(4)},
}


def stacked(name, count=3):
    return np.stack([FILE[name.replace("*", str(i))] for i in range(count)])


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "llama.safetensors"
    save_file(FILE, path)
    return path


def like(shape, spec=None):
    there = None if spec is None else jax.NamedSharding(make_mesh("data=2,fsdp=4"), spec)
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=there)


def load(file, tree, rename, transform=None):
    return eqxshard.load_weights(
        file, tree, rename=rename, transform=transform, partial=True
    )


@pytest.mark.parametrize(
    "rename",
    [
        lambda path: f"model.{path}",
        {r"^norm": "m.norm", r"^m\.(\w+)": r"model.\1"},
        # Two paths may have one array.
        lambda path: "model.norm.weight",
    ],
)
def test_names_are_made_of_paths(file, rename):
    loaded = load(file, {"norm": {"weight": like((8,))}}, rename)
    np.testing.assert_array_equal(loaded["norm"]["weight"], FILE["model.norm.weight"])


@pytest.mark.parametrize("ignore", [r"^mo(e|del\.l)|^odd", ["^moe|odd", r"_proj$", "up"]])
def test_arrays_that_are_ignored_are_neither_missed_nor_read(file, ignore, caplog):
    tree, rename = {"norm": like((8,))}, {"^norm$": "model.norm.weight"}
    loaded = eqxshard.load_weights(file, tree, rename=rename, ignore=ignore)
    np.testing.assert_array_equal(loaded["norm"], FILE["model.norm.weight"])
    assert not caplog.records
    with pytest.raises(ValueError, match=r"layers\.0\.up\.weight float32\[8,16\] is only"):
        eqxshard.load_weights(file, tree, rename=rename, ignore=["^moe|odd", "_proj$"])


SPECS = [None, jax.P(None, "fsdp"), jax.P(None, "data", "fsdp")]


@pytest.mark.parametrize("spec", SPECS)
def test_layers_are_stacked(file, spec):
    rename = {"^up$": "model.layers.*.up.weight"}
    loaded = load(file, {"up": like((3, 8, 16), spec)}, rename)["up"]
    np.testing.assert_array_equal(loaded, stacked("model.layers.*.up.weight"))
    if spec == jax.P(None, "data", "fsdp"):
        assert part(loaded) == (3, 4, 4)


@pytest.mark.parametrize(
    "join, spec", [(np.stack, None), *((np.concatenate, spec) for spec in SPECS)]
)
def test_a_transform_joins_the_arrays_of_a_layer(file, join, spec):
    names = [f"model.layers.*.{x}_proj" for x in "qkv"]
    tree = {"qkv": like((3, 12, 8) if join is np.concatenate else (3, 3, 4, 8), spec)}
    loaded = load(file, tree, lambda path: names, lambda path, parts: join(parts))["qkv"]
    whole = np.concatenate([stacked(name) for name in names], axis=1)
    np.testing.assert_array_equal(loaded, whole.reshape(loaded.shape))


def test_one_matrix_is_split_by_the_path(file):
    def transform(path, array):
        return np.split(array, 2)[["first", "second"].index(path)].T - 1

    tree = {"first": like((16, 4)), "second": like((16, 4))}
    loaded = load(file, tree, lambda path: "model.layers.0.up.weight", transform)
    whole = FILE["model.layers.0.up.weight"]
    np.testing.assert_array_equal(loaded["first"], whole[:4].T - 1)
    np.testing.assert_array_equal(loaded["second"], whole[4:].T - 1)


def test_a_report_says_what_fits_and_what_does_not(file):
    tree = {
        "norm": {"weight": like((8,))},
        "up": like((3, 16, 8)),
        "qkv": like((3, 12, 8)),
        "head": like((5,)),
        "deep": like((9, 8, 16)),
    }
    names = {
        "norm.weight": "model.norm.weight",
        "up": "model.layers.*.up.weight",
        "qkv": [f"model.layers.*.{x}_proj" for x in "qkv"],
        "head": None,
        "deep": "model.layers.*.up.weight",
    }

    def transform(path, x):
        return np.concatenate(x) if path == "qkv" else x

    report = compare_weights(file, tree, rename=names.get, transform=transform)
    assert report.matched == {
        "norm.weight": "model.norm.weight",
        "qkv": ", ".join(f"model.layers.*.{x}_proj" for x in "qkv"),
    }
    assert report.missing == {"deep": "model.layers.*.up.weight"}
    assert all(name.startswith(("moe", "odd")) for name in report.unused)
    assert report.unused["moe.1.experts.3.w1"] == "float32[4,8]"
    assert "up is float32[3,8,16] in the file" in report.different["up"]
    assert str(report).startswith(
        "2 in both (the model's path, the file's name):\n  norm.weight  model.norm.weight\n"
    )


ODD = ["model.layers.0.q_proj", "model.layers.0.up.weight"]
REFUSED = {
    "no path": ({"^nrom": "x"}, None, r"'\^nrom' matches no path of the model; the first"),
    "a name": (lambda path: 3, None, r"rename\('x'\) returned 3; return the name"),
    "stars": (lambda path: "*.*.*", None, "more stars than that; each stands"),
    "no transform": (lambda path: ODD, None, "has 2 names in the file; write a transform="),
    "a shape": (lambda path: ODD[1], None, r"is float32\[8,16\] in the file .*, not float"),
    "a type": (lambda path: ODD[0], lambda path, x: x.astype(int), "int64.*, not float32"),
    "unlike layers": (lambda path: "odd.*", None, r"has layers of .* in the file"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_one_sentence(file, case, unannotated):
    rename, transform, says = REFUSED[case]
    with pytest.raises((ValueError, TypeError), match=says):
        load(file, {"x": like((4, 8))}, rename, transform)
