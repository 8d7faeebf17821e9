"""Seconds to make a state and to save it for the first time, with nothing compiled yet.

A process of its own, because it simulates eight devices: fsdp=4 x data=2. The baseline is
Equinox, which makes the model and its optimizer's state eagerly, on one device, and writes
them by `tree_serialise_leaves`. Prints JSON: by task and contestant, one figure per round.

    python benchmarks/_first_state.py --layers 12 48 --models resnet50 --rounds 3
"""

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import equinox as eqx
import jax
import optax
from _side_by_side import take_turns

import eqxshard

sys.path.append(str(Path(__file__).parents[1] / "recipes" / "gallery"))

OPTIM = optax.adamw(1e-3)
nn = eqx.nn


def mlp(layers: int, key: Any) -> Any:
    return nn.MLP(64, 64, 64, layers - 1, key=key)


def resnet50(key: Any) -> Any:
    """He et al. 2015, https://arxiv.org/abs/1512.03385, with group norm."""
    keys = iter(jax.random.split(key, 60))

    def conv(inside: int, outside: int, size: int) -> list[Any]:
        made = nn.Conv2d(inside, outside, size, use_bias=False, key=next(keys))
        return [made, nn.GroupNorm(32, outside)]

    model, inside = [conv(3, 64, 7)], 64
    for width, depth in zip((64, 128, 256, 512), (3, 4, 6, 3)):
        for number in range(depth):
            block = [conv(inside, width, 1), conv(width, width, 3)]
            block += [conv(width, 4 * width, 1)]
            block += [conv(inside, 4 * width, 1)] if number == 0 else []
            model.append(block)
            inside = 4 * width
    return [*model, nn.Linear(inside, 1000, key=next(keys))]


def vit_b16(key: Any) -> Any:
    """Dosovitskiy et al. 2020, https://arxiv.org/abs/2010.11929."""
    keys = iter(jax.random.split(key, 60))
    width = 768
    model: list[Any] = [nn.Conv2d(3, width, 16, 16, key=next(keys))]
    model += [jax.random.normal(next(keys), (n, width)) * 0.02 for n in (1, 197)]
    for _ in range(12):
        attention = nn.MultiheadAttention(12, width, key=next(keys))
        up = nn.Linear(width, 4 * width, key=next(keys))
        down = nn.Linear(4 * width, width, key=next(keys))
        norms = [nn.LayerNorm(width), nn.LayerNorm(width)]
        model.append([attention, up, down, norms])
    return [*model, nn.LayerNorm(width), nn.Linear(width, 1000, key=next(keys))]


def convnext_t(key: Any) -> Any:
    """Liu et al. 2022, https://arxiv.org/abs/2201.03545."""
    keys = iter(jax.random.split(key, 80))
    model, inside = [], 3
    for width, depth in zip((96, 192, 384, 768), (3, 3, 9, 3)):
        size = 4 if inside == 3 else 2
        model.append([nn.Conv2d(inside, width, size, size, key=next(keys))])
        for _ in range(depth):
            depthwise = nn.Conv2d(width, width, 7, groups=width, key=next(keys))
            up = nn.Linear(width, 4 * width, key=next(keys))
            down = nn.Linear(4 * width, width, key=next(keys))
            scale = jax.numpy.full((width,), 1e-6)
            model.append([depthwise, nn.LayerNorm(width), up, down, scale])
        inside = width
    return [*model, nn.LayerNorm(inside), nn.Linear(inside, 1000, key=next(keys))]


def of_gallery(script: str, name: str, key: Any) -> Any:
    """The model of a script of the gallery."""
    return getattr(importlib.import_module(script), name)(key=key)


def gallery_resnet(key: Any) -> Any:
    return nn.make_with_state(partial(of_gallery, "resnet", "ResNet"))(key=key)


GALLERY = {
    "vit": "ViT",
    "rnn": "RNN",
    "diffusion": "Flow",
    "gan": "make_generator",
    "ensemble": "make_ensemble",
    "lora": "make_base",
    "neural_ode": "make_field",
}
MODELS: dict[str, Any] = {make.__name__: make for make in (resnet50, vit_b16, convnext_t)}
MODELS["gallery_resnet"] = gallery_resnet
MODELS |= {f"gallery_{k}": partial(of_gallery, k, v) for k, v in GALLERY.items()}


def with_equinox(make: Callable[[Any], Any], key: Any) -> Any:
    model = make(key)
    return model, OPTIM.init(eqx.filter(model, eqx.is_inexact_array))


def with_eqxshard(make: Callable[[Any], Any], key: Any) -> Any:
    mesh = eqxshard.make_mesh(data=2, fsdp=4)
    rule = eqxshard.fsdp(min_size=2**12)
    return eqxshard.init_state(make, OPTIM, key=key, mesh=mesh, rule=rule)


def save_with_equinox(state: Any, folder: str) -> None:
    eqx.tree_serialise_leaves(Path(folder) / "state.eqx", state)


def save_with_eqxshard(state: Any, folder: str) -> None:
    checkpointer = eqxshard.Checkpointer(folder)
    checkpointer.save(state)
    checkpointer.wait()
    checkpointer.close()


def seconds_to_start(build: Any, save: Any, make: Callable[[Any], Any]) -> list[float]:
    """Seconds to make a state, and then to save it."""
    key = jax.block_until_ready(jax.random.key(0))
    jax.clear_caches()
    start = time.perf_counter()
    state = build(make, key)
    jax.block_until_ready(jax.tree.leaves(eqx.filter(state, eqx.is_array)))
    made = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        save(state, folder)
        return [made - start, time.perf_counter() - made]


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--layers", type=int, nargs="*", default=[])
    options.add_argument("--models", nargs="*", default=[], choices=MODELS)
    options.add_argument("--rounds", type=int, default=3)
    args = options.parse_args()
    makes: dict[str, Any] = {str(n): partial(mlp, n) for n in args.layers}
    makes |= {name: MODELS[name] for name in args.models}
    found = {}
    for name, make in makes.items():
        turns = {
            "Equinox": partial(seconds_to_start, with_equinox, save_with_equinox, make),
            "eqxshard": partial(seconds_to_start, with_eqxshard, save_with_eqxshard, make),
        }
        found[name] = take_turns(turns, args.rounds)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
