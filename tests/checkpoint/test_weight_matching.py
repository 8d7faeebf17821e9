"""Arrays of a file under other names, in other layouts, stacked or concatenated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_mesh, part
from safetensors.numpy import save_file

import eqxshard

RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


#: Layers of a Llama and of a mixture of experts, by their names in files.
FILE = {
    "model.norm.weight": normal(8),
    **{f"model.layers.{i}.{x}_proj": normal(4, 8) for i in range(3) for x in "qkv"},
    **{f"model.layers.{i}.up.weight": normal(8, 16) for i in range(3)},
    **{f"moe.{i}.experts.{j}.w1": normal(4, 8) for i in range(2) for j in range(4)},
}


def stacked(name, count=3):
    return np.stack([FILE[name.replace("*", str(i))] for i in range(count)])


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "llama.safetensors"
    save_file(FILE, path)
    return path


def like(shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def load(file, tree, rename, transform=None, spec=None, partial=True):
    shardings = None
    if spec is not None:
        shardings = jax.NamedSharding(make_mesh("data=2,fsdp=4"), spec)
    return eqxshard.load_weights(
        file, tree, shardings, rename=rename, transform=transform, partial=partial
    )


# Names


@pytest.mark.parametrize(
    "rename",
    [
        lambda path: f"model.{path}",
        {"^": "model."},
        {r"^norm": "m.norm", r"^m\.(\w+)": r"model.\1"},
    ],
)
def test_names_are_made_of_paths(file, rename):
    loaded = load(file, {"norm": {"weight": like((8,))}}, rename)
    np.testing.assert_array_equal(loaded["norm"]["weight"], FILE["model.norm.weight"])


def test_two_paths_may_have_one_array(file):
    tree = {"tied": like((8,)), "norm": like((8,))}
    loaded = load(file, tree, lambda path: "model.norm.weight")
    np.testing.assert_array_equal(loaded["tied"], loaded["norm"])


# Names in the file that are of no use


@pytest.mark.parametrize("ignore", [r"^mo(e|del\.l)", ["^moe", r"_proj$", "up"]])
def test_arrays_that_are_ignored_are_neither_missed_nor_read(file, ignore, caplog):
    tree, rename = {"norm": like((8,))}, {"^norm$": "model.norm.weight"}
    loaded = eqxshard.load_weights(file, tree, rename=rename, ignore=ignore)
    np.testing.assert_array_equal(loaded["norm"], FILE["model.norm.weight"])
    assert not caplog.records
    assert not eqxshard.compare_weights(file, tree, rename=rename, ignore=ignore).unused
    with pytest.raises(ValueError, match=r"layers\.0\.up\.weight float32\[8,16\] is only"):
        eqxshard.load_weights(file, tree, rename=rename, ignore=["^moe", "_proj$"])
    # It says which names are of no use, not which are read.
    eqxshard.load_weights(file, tree, rename=rename, ignore="")


# Several arrays as one

SPECS = [None, jax.P(None, "fsdp"), jax.P(None, None, "fsdp"), jax.P(None, "data", "fsdp")]


@pytest.mark.parametrize("spec", SPECS)
def test_layers_are_stacked(file, spec):
    rename = {"^up$": "model.layers.*.up.weight"}
    loaded = load(file, {"up": like((3, 8, 16))}, rename, spec=spec)["up"]
    np.testing.assert_array_equal(loaded, stacked("model.layers.*.up.weight"))
    if spec == jax.P(None, "data", "fsdp"):
        assert part(loaded) == (3, 4, 4)


@pytest.mark.parametrize(
    "join, spec", [(np.stack, None), *((np.concatenate, spec) for spec in SPECS)]
)
def test_a_transform_joins_the_arrays_of_a_layer(file, join, spec):
    names = [f"model.layers.*.{x}_proj" for x in "qkv"]
    tree = {"qkv": like((3, 12, 8) if join is np.concatenate else (3, 3, 4, 8))}
    transform = lambda path, parts: join(parts)  # noqa: E731
    loaded = load(file, tree, lambda path: names, transform, spec)["qkv"]
    whole = np.concatenate([stacked(name) for name in names], axis=1)
    np.testing.assert_array_equal(loaded, whole.reshape(loaded.shape))


@pytest.mark.parametrize("spec", [None, jax.P("data", "fsdp"), jax.P(None, ("data",))])
def test_experts_of_layers_are_stacked_twice(file, spec):
    rename = {"^w1$": "moe.*.experts.*.w1"}
    loaded = load(file, {"w1": like((2, 4, 4, 8))}, rename, spec=spec)["w1"]
    expected = [stacked(f"moe.{i}.experts.*.w1", 4) for i in range(2)]
    np.testing.assert_array_equal(loaded, np.stack(expected))


def test_scalars_are_stacked(tmp_path):
    file = tmp_path / "x.safetensors"
    save_file({f"s{i}": np.array(i, np.float32) for i in range(4)}, file)
    loaded = load(file, {"s": like((4,))}, {"^s$": "s*"}, spec=jax.P("fsdp"))
    np.testing.assert_array_equal(loaded["s"], np.arange(4.0))


def test_no_host_array_is_larger_than_a_part(file, monkeypatch):
    sizes = []
    empty = np.empty

    def watched(shape, *args, **options):
        sizes.append(np.prod(shape))
        return empty(shape, *args, **options)

    monkeypatch.setattr(np, "empty", watched)
    tree = {"up": like((3, 16, 8))}
    rename = {"^up$": "model.layers.*.up.weight"}
    loaded = load(file, tree, rename, lambda path, x: x.T, jax.P(None, "fsdp", "data"))
    assert part(loaded["up"]) == (3, 4, 4) and max(sizes) == 48
    transposed = stacked("model.layers.*.up.weight").transpose(0, 2, 1)
    np.testing.assert_array_equal(loaded["up"], transposed)


# Changes


def test_one_matrix_is_split_by_the_path(file):
    def transform(path, array):
        return np.split(array, 2)[["first", "second"].index(path)].T

    tree = {"first": like((16, 4)), "second": like((16, 4))}
    loaded = load(file, tree, lambda path: "model.layers.0.up.weight", transform)
    whole = FILE["model.layers.0.up.weight"]
    np.testing.assert_array_equal(loaded["first"], whole[:4].T)
    np.testing.assert_array_equal(loaded["second"], whole[4:].T)


def test_arithmetic_is_possible_and_the_file_cannot_be_changed(file):
    rename = {"^norm$": "model.norm.weight"}
    loaded = load(file, {"norm": like((8,))}, rename, lambda path, x: x - 1)
    np.testing.assert_array_equal(loaded["norm"], FILE["model.norm.weight"] - 1)

    def change(path, array):
        array -= 1
        return array

    with pytest.raises(ValueError, match="read-only") as error:
        load(file, {"norm": like((8,))}, rename, change)
    assert error.value.__notes__ == ["(in the transform of model.norm.weight for norm)"]


# Reports


def test_a_report_says_what_fits_and_what_does_not(file):
    tree = {
        "norm": {"weight": like((8,))},
        "up": like((3, 16, 8)),
        "down": like((4, 8)),
        "qkv": like((3, 12, 8)),
        "head": like((5,)),
        "deep": like((9, 8, 16)),
    }

    def rename(path):
        return {
            "norm.weight": "model.norm.weight",
            "up": "model.layers.*.up.weight",
            "down": "model.layers.0.q_proj",
            "qkv": [f"model.layers.*.{x}_proj" for x in "qkv"],
            "head": None,
            "deep": "model.layers.*.up.weight",
        }[path]

    def transform(path, x):
        return np.concatenate(x) if path == "qkv" else x

    report = eqxshard.compare_weights(file, tree, rename=rename, transform=transform)
    qkv = ", ".join(f"model.layers.*.{x}_proj" for x in "qkv")
    assert report.matched == {
        "down": "model.layers.0.q_proj",
        "norm.weight": "model.norm.weight",
        "qkv": qkv,
    }
    assert report.missing == {"deep": "model.layers.*.up.weight"}
    assert report.kept == ("head",)
    assert list(report.unused) == [name for name in FILE if name.startswith("moe")]
    assert report.unused["moe.1.experts.3.w1"] == "float32[4,8]"
    says = "up has shape [3, 8, 16] there (as model.layers.*.up.weight), not [3, 16, 8]"
    assert report.different == {"up": says}
    lines = str(report).splitlines()
    assert lines[0] == "3 in both (the model's path, the file's name):"
    assert lines[2:5] == [
        "  norm.weight  model.norm.weight",
        f"  qkv          {qkv}",
        "1 only in the model:",
    ]
    assert lines[6:9] == ["1 not to be read:", "  head", "8 only in the file:"]
    assert lines[-2:] == ["1 that differ:", f"  {says}"]


ODD = ["model.layers.0.q_proj", "model.layers.0.up.weight"]
REFUSED = {
    "no path": ({"^nrom": "x"}, None, r"'\^nrom' matches no path of the model; the first"),
    "a pattern": ({"(": ""}, None, r"'\(' or its .* not a regular expression .*; escape"),
    "a group": ({"x": r"\2"}, None, "not a regular expression"),
    "a name": (lambda path: 3, None, r"rename\('x'\) returned 3; return the name"),
    "names": (lambda path: ["a", None], None, "returned .*; return the name"),
    "stars": (lambda path: "*.*.*", None, "more stars than that; each stands"),
    "no transform": (lambda path: ODD, None, "has 2 names in the file; write a transform="),
    "a shape": (
        lambda path: ODD[1],
        None,
        r"has shape \[8, 16\] there .*, not \[4",
    ),
    "a type": (
        lambda path: ODD[0],
        lambda path, x: x.astype(int),
        "has dtype int64 there .*, not float32",
    ),
    "unlike layers": (
        lambda path: "odd.*",
        None,
        r"layers float32\[16\] there",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_one_sentence(file, tmp_path, case, unannotated):
    rename, transform, says = REFUSED[case]
    path = tmp_path / "x.safetensors"
    odd = {f"odd.{i}": normal(8 if i < 3 else 16) for i in range(4)}
    save_file(FILE | odd, path)
    with pytest.raises((ValueError, TypeError), match=says):
        load(path, {"x": like((4, 8))}, rename, transform)
