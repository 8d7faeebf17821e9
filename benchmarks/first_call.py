"""Seconds to call a train step for the first time, and to make a state: both compile.

- The first call of the step of a model with a list of layers: dense layers, and blocks of
  a transformer in float32 and in bfloat16. The baseline is the same step by `jax.jit`
  by hand, on the same arrays: parameters stored over fsdp, gathered for use, gradients
  constrained back, the state donated. A second one has the guard of
  `optax.apply_if_finite`. All are checked to reach the same losses.
- `init_state` of blocks in a list, over data=2 x fsdp=4. The baseline is Equinox, eagerly,
  on one device, with AdamW's state. The second state of a process is made once warm.

All run on simulated CPU devices, each turn in a new process without a compilation cache.

    python benchmarks/first_call.py --output build/benchmarks
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from _side_by_side import Contest, Report, parser, take_turns

#: The allowed relative errors of losses, in float32 (False) and in bfloat16 (True).
RELATIVE_ERRORS = {False: 1e-3, True: 3e-2}


def turn(*words: Any, data: int, fsdp: int) -> dict[str, Any]:
    """The figures of one process."""
    script = Path(__file__).parent / "_first_call.py"
    words += "--data", data, "--fsdp", fsdp
    settings = {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(data * fsdp),
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    done = subprocess.run(
        [sys.executable, str(script), *map(str, words)],
        env={**os.environ, **settings},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def against_jit(
    model: str, layers: int, bfloat16: bool, rounds: int, mesh: Mapping[str, int]
) -> tuple[Contest, dict[str, int]]:
    """The first calls of a model's step, and the frames that eqxshard's goes through."""
    precision = ["--bfloat16"] if bfloat16 else []
    turns = {
        name: partial(turn, "step", who, model, layers, *precision, **mesh)
        for name, who in (
            ("jax.jit by hand", "by_hand"),
            ("jax.jit with apply_if_finite", "by_hand_guarded"),
            ("eqxshard", "by_eqxshard"),
        )
    }
    found = take_turns(turns, rounds)
    by_hand, guarded, ours = found.values()
    for other in guarded, ours:
        losses = other[0]["losses"]
        np.testing.assert_allclose(losses, by_hand[0]["losses"], RELATIVE_ERRORS[bfloat16])
    says = {"dense": "dense layers", "blocks": "transformer blocks"}[model]
    axes = " x ".join(f"{axis}={size}" for axis, size in mesh.items() if size > 1)
    title = f"{layers} {says} in {'bfloat16' if bfloat16 else 'float32'}, {axes}"
    seconds = {name: [each["seconds"] for each in turns] for name, turns in found.items()}
    return Contest(f"first call, {title}", "s", seconds), ours[0]["frames"]


def against_equinox(layers: int, rounds: int) -> Contest:
    """The first state of a process, and the second one."""
    turns = {
        name: partial(turn, "state", f"with_{name.lower()}", layers, data=2, fsdp=4)
        for name in ("Equinox", "eqxshard")
    }
    found = take_turns(turns, rounds)
    seconds: dict[str, Sequence[float]] = {
        f"{name}, {says}": [each["seconds"][i] for each in found[name]]
        for name in found
        for i, says in ((1, "once warm"), (0, "first"))
    }
    return Contest(f"{layers} blocks, to make a state", "s", seconds)


def main() -> None:
    options = parser(__doc__, rounds=5)
    options.add_argument("--dense", type=int, default=120, metavar="LAYERS")
    options.add_argument("--blocks", type=int, default=16, metavar="LAYERS")
    options.add_argument("--listed", type=int, default=120, metavar="BLOCKS")
    options.add_argument("--data", type=int, default=1, metavar="DEVICES")
    options.add_argument("--fsdp", type=int, default=8, metavar="DEVICES")
    args = options.parse_args()
    mesh, contests, frames = {"data": args.data, "fsdp": args.fsdp}, [], {}
    for model, layers, bfloat16 in (
        ("blocks", args.blocks, False),
        ("blocks", args.blocks, True),
        ("dense", args.dense, False),
    ):
        contest, frames = against_jit(model, layers, bfloat16, args.rounds, mesh)
        contests.append(contest)
    contests.append(against_equinox(args.listed, args.rounds))
    # The frames are the same for every model.
    setting = {"rounds": args.rounds, "frames of eqxshard": frames}
    Report("first_call", contests, setting).show_and_write(args.output)


if __name__ == "__main__":
    main()
