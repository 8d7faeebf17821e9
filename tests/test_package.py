"""The package as a whole: its rooms, its names, its pages."""

import ast
import importlib
import importlib.metadata
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import eqxshard

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "eqxshard"
FILES = sorted(PACKAGE.rglob("*.py"))

#: A room may import from rooms of the ranks above its own line, and from itself.
RANKS = [
    {"_errors", "_jax"},
    {"_parser", "distributed", "pages"},
    {"sharding"},
    {"transforms", "compiled"},
    {"training"},
    {"data", "checkpoint", "inspect"},
    {"debug"},
    {"loop"},
    {"trackers"},
    {"planning"},
    {"run"},
    {"testing"},
]
#: Rooms and modules aside, and the rooms that they may import from.
ASIDE = {
    "__main__": {"_info", "_parser", "run"},
    "_info": set(),
    "callbacks": {"loop"},
    "nn": {"_jax", "sharding", "transforms", "parallel"},
    "parallel": {"sharding", "transforms"},
    "launch": {"_parser", "distributed"},
}


def module_of(file):
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(file):
    """The imports of a file: (module, names) with the module's name in full."""
    package = ["eqxshard", *file.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*above, *([node.module] if node.module else [])])
            yield name, [alias.name for alias in node.names]


def imported_modules(file):
    """The rooms that a file imports from, other than its own."""
    for module, names in imports(file):
        package, _, rest = module.partition(".")
        if package == "eqxshard":
            found = {rest.partition(".")[0]} if rest else set(names)
            yield from found - {module_of(file)}


def file_name(file):
    return str(file.relative_to(PACKAGE))


def test_imports_run_downward():
    wrong = {}
    for file in FILES:
        module = module_of(file)
        if module == "__init__":
            continue
        ranks = [rank for rank, rooms in enumerate(RANKS) if module in rooms]
        assert ranks or module in ASIDE, f"give {module} a place in RANKS or ASIDE"
        below = ASIDE[module] if module in ASIDE else set().union(*RANKS[: ranks[0]])
        allowed = below | {"_errors"}
        upward = set(imported_modules(file)) - allowed
        wrong |= {file_name(file): upward} if upward else {}
    assert wrong == {}


def test_nothing_private_of_other_packages_is_imported():
    private = []
    for file in FILES:
        for module, names in imports(file):
            parts = [*module.split("."), *names]
            if parts[0] not in ("eqxshard", "__future__"):
                found = [part for part in parts if part.startswith("_")]
                private += [(file_name(file), part) for part in found]
        assert "_src" not in file.read_text(), file
    assert private == []


#: The names that a program with its own loop uses.
BY_HAND = ["make_mesh", "fsdp", "init_state", "make_train_step", "make_eval_step"]
BY_HAND += ["Loader", "fit", "evaluate", "explain", "Checkpointer", "filter_shard"]
#: Packages that are imported when they are first needed.
LATER = {"grain", "matplotlib", "rich", "safetensors", "tensorstore", "tyro"}


@pytest.mark.versions
def test_importing_loads_only_what_is_used_touches_no_device_and_starts_no_thread():
    modules = [name for _, name, _ in pkgutil.walk_packages(["eqxshard"], "eqxshard.")]
    code = f"""if True:
        import importlib, sys, threading
        import jax, equinox, optax
        before = set(sys.modules)
        import eqxshard
        print(*(set(sys.modules) - before))
        for name in {BY_HAND}:
            getattr(eqxshard, name)
        print(*(set(sys.modules) - before))
        for module in {modules}:
            importlib.import_module(module)
        assert threading.active_count() == 1, threading.enumerate()
        try:
            jax.devices()
        except RuntimeError as error:
            print(error)
    """
    # On a platform that is not there, the first touch of a device is an error.
    environment = {**os.environ, "JAX_PLATFORMS": "nowhere"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert run.stderr == ""
    first, used, *error = run.stdout.splitlines()
    assert "nowhere" in "".join(error)
    packages = [{x.partition(".")[0] for x in line.split()} for line in (first, used)]
    assert packages[0] <= {"eqxshard", "lazy_loader"}
    assert not packages[1] & LATER


def re_exported(front):
    """The names that a package re-exports: (name, the name it gets)."""
    stub = front.with_suffix(".pyi")
    source = stub if stub.exists() else front
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            yield from ((alias.name, alias.asname) for alias in node.names)


FRONTS = sorted(PACKAGE.rglob("__init__.py"))
#: Rooms whose public names are all in `eqxshard` itself.
PRIVATE_ROOMS = ("compiled", "loop", "pages", "rewrite", "transforms")


def test_every_public_name_is_re_exported_once_as_itself():
    for front in FRONTS:
        assert ast.get_docstring(ast.parse(front.read_text())), front
        names = list(re_exported(front))
        assert names or front.parent.name in PRIVATE_ROOMS, front
        wrong = [name for name, new in names if new != name or name.startswith("_")]
        assert wrong == [] and len(names) == len(set(names)), front


def test_the_top_level_has_at_most_fifty_names_beside_rooms():
    names = [name for name in dir(eqxshard) if not name.startswith("_")]
    names = [name for name in names if not inspect.ismodule(getattr(eqxshard, name))]
    assert len(names) <= 50, names


def test_rooms_with_public_names_are_found_without_an_import_of_their_own():
    rooms = [front.parent for front in FRONTS if front.parent.parent == PACKAGE]
    public = [room.name for room in rooms if room.name not in PRIVATE_ROOMS]
    script = f"import eqxshard; [getattr(eqxshard, name) for name in {public}]"
    subprocess.run([sys.executable, "-c", script], check=True)


def public_objects():
    """Every public function, class and method, by its full name."""
    for front in FRONTS:
        path = ["eqxshard", *front.relative_to(PACKAGE).parent.parts]
        package = importlib.import_module(".".join(path))
        for name, _ in re_exported(front):
            item, full = getattr(package, name), ".".join([*path, name])
            if inspect.isclass(item):
                methods = ((k, getattr(item, k)) for k in vars(item) if k[0] != "_")
                yield from ((f"{full}.{k}", v) for k, v in methods if inspect.isroutine(v))
            if inspect.isclass(item) or inspect.isroutine(item):
                yield full, item


OBJECTS = dict(public_objects())


def undocumented(name):
    """The arguments that a docstring leaves out; True if there is none."""
    item = OBJECTS[name]
    doc = inspect.getdoc(item)
    # A dataclass without one gets its signature.
    if not doc or doc.startswith(f"{item.__name__}("):
        return True
    if inspect.isclass(item) and "**Arguments:**" not in doc:
        return []  # A protocol, or what a function returns.
    if name.rpartition(".")[0] in OBJECTS and "**Arguments:**" not in doc:
        return []  # A method that its one line describes.
    heads = "".join(re.findall(r"^- ([^:]*):", doc, flags=re.MULTILINE))
    arguments = [arg for arg in inspect.signature(item).parameters if arg != "self"]
    return [arg for arg in arguments if f"`{arg}`" not in heads]


def test_every_public_thing_has_a_docstring_with_its_arguments():
    assert {name: undocumented(name) for name in OBJECTS if undocumented(name)} == {}


#: Parts of JAX without a promise: modules, attributes of equations and types, and the
#: state of `jax.distributed`.
UNVERSIONED = (
    r"jax\.(extend|interpreters|core|_src)\b"
    r"|\.(ctx|source_info|get_bind_params|global_state)\b"
)


def test_unversioned_jax_is_touched_in_one_file():
    found = [path.name for path in FILES if re.search(UNVERSIONED, path.read_text())]
    assert found == ["_jax.py"]
    text = (PACKAGE / "_jax.py").read_text()
    names = re.findall(r"import \w+ as (\w+)", text) + re.findall(r"def (\w+)", text)
    # Read the list before you make it longer.
    assert sorted(names) == [
        "ClosedJaxpr",
        "Jaxpr",
        "Literal",
        "ShapedArray",
        "Tracer",
        "Var",
        "at_line_of",
        "bind",
        "context_of",
        "coordination_client",
        "dce_jaxpr",
        "frames_of",
        "gensym",
        "get_compile_options",
        "ir",
        "jaxpr_as_fun",
        "make_ir_context",
        "mapped_axes",
        "mesh_of",
        "scope_of",
        "varies_along",
        "with_context",
    ]


@pytest.mark.slow
def test_a_file_whose_tests_are_all_left_out_says_how_to_run_them():
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "--collect-only"]
    done = subprocess.run(
        [*command, "tests/gpu/test_plan_step.py"], cwd=ROOT, capture_output=True, text=True
    )
    assert "none of these tests ran: add -m gpu\n" in done.stdout
