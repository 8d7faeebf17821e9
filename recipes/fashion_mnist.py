"""Train a small classifier on Fashion-MNIST, on whatever devices there are."""

import difflib
import itertools
import json
import math
import os
import statistics
import sys
from collections.abc import Collection
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import tyro
from equinox import nn
from jax.sharding import Mesh
from rich.console import Console
from rich.panel import Panel

import eqxshard
from eqxshard import data, distributed, trackers
from eqxshard.mesh import AXES, describe


class ConvNet(eqx.Module):
    """Two convolutions, each with an average pool, and two linear layers."""

    conv1: nn.Conv2d
    conv2: nn.Conv2d
    # The types name the dims, for rules such as tensor parallelism's.
    hidden: Annotated[nn.Linear, "mlp features"]
    logits: Annotated[nn.Linear, "classes mlp"]

    def __init__(self, conv1, conv2, kernel2, hidden, *, key):
        keys = jax.random.split(key, 4)
        side = (13 - kernel2 + 1) // 2
        self.conv1 = nn.Conv2d(1, conv1, 3, key=keys[0])
        self.conv2 = nn.Conv2d(conv1, conv2, kernel2, key=keys[1])
        self.hidden = nn.Linear(conv2 * side**2, hidden, key=keys[2])
        self.logits = nn.Linear(hidden, 10, key=keys[3])

    def __call__(self, x):
        pool = nn.AvgPool2d(2, 2)
        x = pool(jax.nn.relu(self.conv1(x)))
        x = pool(jax.nn.relu(self.conv2(x)))
        return self.logits(jax.nn.relu(self.hidden(jnp.ravel(x))))


class MLP(eqx.Module):
    """Two hidden layers."""

    hidden1: Annotated[nn.Linear, "mlp pixels"]
    hidden2: Annotated[nn.Linear, "features mlp"]
    logits: Annotated[nn.Linear, "classes features"]

    def __init__(self, *, key):
        keys = jax.random.split(key, 3)
        self.hidden1 = nn.Linear(784, 256, key=keys[0])
        self.hidden2 = nn.Linear(256, 128, key=keys[1])
        self.logits = nn.Linear(128, 10, key=keys[2])

    def __call__(self, x):
        x = jax.nn.relu(self.hidden1(jnp.ravel(x)))
        return self.logits(jax.nn.relu(self.hidden2(x)))


def predict(model, batch):
    """The logits. Images stay bytes until they are on the devices."""
    pixels = (batch["image"][:, None] / 255 - 0.2860) / 0.3530
    return jax.vmap(model)(pixels)


def loss_fn(model, batch, key):
    logits = predict(model, batch)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


def metric_fn(model, batch):
    correct = jnp.argmax(predict(model, batch), axis=-1) == batch["label"]
    return {"accuracy": correct, "loss": loss_fn(model, batch, None)}


def train(args: "Args") -> str | None:
    """Train, evaluate and write the results; return the last line to print.

    Of several processes, the first alone writes and prints.
    """
    make_model, name, epochs = choose("model", args.model, MODELS)
    epochs = epochs if args.epochs is None else at_least_1("epochs", args.epochs)
    rule = choose("rule", args.rule, RULES)
    mesh = make_mesh(args)

    train_data, test_data, why_synthetic = load(args)
    dataset = "synthetic" if why_synthetic else "fashion_mnist"
    # Hosts may differ in what can be had there.
    distributed.agree("data", {"name": dataset})
    if args.batch_size > len(train_data):
        raise ValueError(
            f"--batch-size {args.batch_size} is more than the {len(train_data)} examples; "
            "use fewer."
        )
    loader = eqxshard.Loader(
        train_data, batch_size=args.batch_size, mesh=mesh, seed=args.seed
    )
    test = eqxshard.Loader(test_data, batch_size=args.batch_size, mesh=mesh, shuffle=False)
    optim = make_optimizer(args, steps=epochs * len(loader))

    output = output_folder(args)
    every = (
        len(loader)
        if args.save_every is None
        else at_least_1("save-every", args.save_every)
    )
    checkpointer = eqxshard.Checkpointer(
        output / "checkpoints", every=every, best="eval/accuracy"
    )
    resumes = check_resume(args, output, checkpointer)
    key = jax.random.key(args.seed)
    where = {"key": key, "mesh": mesh, "rule": rule}
    if resumes:
        like = eqxshard.abstract_state(make_model, optim, **where)
        state = checkpointer.restore(like)
    else:
        state = eqxshard.init_state(make_model, optim, **where)
    first = int(state.step)
    train_step = eqxshard.make_train_step(loss_fn, optim, mesh=mesh, rule=rule)
    eval_step = eqxshard.make_eval_step(metric_fn, mesh=mesh, rule=rule)

    title = f"{name} on {describe(mesh)}"
    if why_synthetic:
        title += " | synthetic data"
    checkpointer.check_start(first, loader)
    reports = []
    if jax.process_index() == 0:
        curves = trackers.Curves(output / "curves.png", title=title)
        # Empties its file, so it comes after what could still be refused.
        lines = trackers.JSONLines(
            output / "metrics.jsonl",
            extra={"data": dataset},
            keep_until=first if resumes else None,
        )
        for line in read_lines(output / "metrics.jsonl"):
            # Not the name of the data, nor the null of what was not finite.
            step = line.pop("step")
            curves.log(step, {k: v for k, v in line.items() if isinstance(v, int | float)})
        # An earlier run's, which would contradict the metrics if this one is stopped.
        (output / "summary.json").unlink(missing_ok=True)
        if why_synthetic:
            warn_synthetic(why_synthetic)
        progress = trackers.ProgressBar(epochs * len(loader), title=title)
        if first >= epochs * len(loader):
            print(f"training was finished already, at step {first}; nothing is left to do.")
        elif resumes:
            print(f"going on from step {first}.")
        reports = [curves, lines, progress]

    state = eqxshard.fit(
        state,
        train_step,
        loader,
        epochs=epochs,
        evaluate=lambda model: eqxshard.evaluate(model, eval_step, test),
        checkpointer=checkpointer,
        trackers=reports,
    )
    if jax.process_index() > 0:
        return None

    summary = summarize(read_lines(output / "metrics.jsonl"), len(train_data)) | {
        "data": dataset,
        "devices": describe(mesh),
        "parameters": sum(
            map(jnp.size, jax.tree.leaves(eqx.filter(state.model, eqx.is_array)))
        ),
        "settings": asdict(args) | {"epochs": epochs},
        "versions": {
            module.__name__: module.__version__ for module in (eqxshard, jax, optax)
        },
    }
    (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(f"numbers and curves are in {output}")
    speed = f"{summary['images_per_second']:,.0f}".replace(",", " ")
    return (
        f"test accuracy {summary['test_accuracy']:.4f} | "
        f"{summary['seconds_per_epoch']:.1f} s/epoch | {speed} images/s | {title}"
    )


MODELS = {
    "lenet": (lambda key: ConvNet(20, 50, 5, 128, key=key), "LeNet", 10),
    "cnn": (lambda key: ConvNet(32, 64, 3, 256, key=key), "CNN", 5),
    "mlp": (lambda key: MLP(key=key), "MLP", 10),
}
RULES = {
    "replicate": eqxshard.replicate(),
    # The least size that is fsdp's own default is for models worth splitting.
    "fsdp": eqxshard.fsdp(min_size=2**10),
    "tensor": eqxshard.by_dim({"mlp": "tensor"}),
}
OPTIMIZERS = {
    "adamw": (partial(optax.adamw, b2=0.98, weight_decay=0.01), 5e-3),
    "adam": (partial(optax.adam, b2=0.98), 5e-3),
    "sgd": (partial(optax.sgd, momentum=0.9, nesterov=True), 0.05),
}
DATA = ("auto", "fashion_mnist", "synthetic")
RESUME = ("no", "yes", "auto")


def one_of(names: Collection[str]) -> Any:
    return tyro.conf.arg(metavar="{" + ",".join(names) + "}")


def by_default(metavar: str, default: str) -> Any:
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})")


@dataclass(frozen=True)
class Args:
    """Train a small classifier on Fashion-MNIST, split over the devices of a mesh.

    Without options: LeNet for 10 epochs, on all accelerators or, without any, on as many
    simulated CPU devices as the machine has cores. The data are downloaded if need be.
    """

    model: Annotated[str, one_of(MODELS)] = "lenet"
    """The model; all are plain equinox.nn."""
    epochs: Annotated[int | None, by_default("INT", "10; cnn: 5")] = None
    """How often to go through the data."""
    batch_size: int = 256
    """Examples per step, over all devices."""
    optimizer: Annotated[str, one_of(OPTIMIZERS)] = "adamw"
    """Its learning rate rises over a twentieth of the steps, then falls to a hundredth."""
    learning_rate: Annotated[float | None, by_default("FLOAT", "0.005; sgd: 0.05")] = None
    """The highest learning rate."""
    devices: Annotated[int | None, by_default("INT", "all; CPU: one per core")] = None
    """How many devices to use. CPU devices are simulated."""
    mesh: Annotated[str | None, by_default("AXIS=SIZE,...", "the rule's axis")] = None
    """Sizes of mesh axes, such as data=4,fsdp=2; -1 takes what is left."""
    rule: Annotated[str, one_of(RULES)] = "replicate"
    """Where parameters are: whole on each device, or split over the fsdp or tensor axis."""
    seed: int = 0
    """Decides the initial parameters and the order of the data."""
    data: Annotated[str, one_of(DATA)] = "auto"
    """auto is fashion_mnist or, where that cannot be had, the generated stand-in."""
    data_dir: Annotated[
        str | None, by_default("DIR", "$EQXSHARD_DATA_DIR, or the user's cache")
    ] = None
    """Where the folder fashion_mnist is, or is to be put."""
    output: Annotated[str | None, by_default("DIR", "runs/fashion_mnist-MODEL")] = None
    """For metrics.jsonl, summary.json, curves.png and checkpoints."""
    resume: Annotated[str, one_of(RESUME)] = "no"
    """Go on from the newest checkpoint in --output; auto: if there is one."""
    save_every: Annotated[int | None, by_default("INT", "an epoch")] = None
    """Steps between checkpoints."""


def choose(kind: str, name: str, among: Any) -> Any:
    if name in among:
        return among[name] if isinstance(among, dict) else name
    near = difflib.get_close_matches(name, among, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"unknown {kind} {name!r}; {hint}use one of {', '.join(among)}.")


def at_least_1(name: str, value: int) -> int:
    if value < 1:
        raise ValueError(f"--{name} {value} is too few; use 1 or more.")
    return value


def load(args: Args) -> tuple[data.ArraySource, data.ArraySource, str]:
    """What to train and to test on; and why that is synthetic, if it is."""
    why_synthetic = "As asked for with --data synthetic."
    if choose("dataset", args.data, DATA) != "synthetic":
        try:
            train_data = data.fashion_mnist("train", data_dir=args.data_dir)
            test_data = data.fashion_mnist("test", data_dir=args.data_dir)
            return train_data, test_data, ""
        except FileNotFoundError as error:
            if args.data == "fashion_mnist":
                raise
            why_synthetic = str(error)
    return data.synthetic_fashion("train"), data.synthetic_fashion("test"), why_synthetic


def warn_synthetic(why: str) -> None:
    Console(stderr=True).print(
        Panel(
            "Training on generated images, NOT on Fashion-MNIST: accuracies say nothing "
            f"about the real data.\n\n{why}",
            title="SYNTHETIC DATA",
            style="bold yellow",
        )
    )


def output_folder(args: Args) -> Path:
    if args.output is None:
        return Path(f"runs/fashion_mnist-{args.model}")
    if not args.output:
        raise ValueError("--output is empty; give a folder, or leave the option out.")
    return Path(args.output)


def check_resume(args: Args, output: Path, checkpointer: eqxshard.Checkpointer) -> bool:
    """Whether there is something to go on from; refuse to write over it otherwise."""
    # As the first process sees it, before it makes the folder: all must do the same.
    steps, is_there = distributed.from_first([checkpointer.steps(), output.is_dir()])
    if choose("way to resume", args.resume, RESUME) == "no" and steps:
        raise ValueError(
            f"{output} has the checkpoint of step {steps[-1]} of an earlier run; add "
            "--resume to go on from it, or give another --output."
        )
    if args.resume == "yes" and not is_there:
        raise ValueError(
            f"there is no run in {output} to go on with; leave --resume out, or write "
            "--resume auto."
        )
    return bool(steps)


def make_mesh(args: Args) -> Mesh:
    by_rule = {"replicate": "data=-1", "fsdp": "fsdp=-1", "tensor": "tensor=-1"}
    sizes = parse_mesh(by_rule[args.rule] if args.mesh is None else args.mesh)
    sizes.setdefault("data", 1 if -1 in sizes.values() else -1)
    at_least_1("batch-size", args.batch_size)
    if args.devices is not None:
        at_least_1("devices", args.devices)
    # How many there are of each process is for who starts several to say.
    if "JAX_NUM_CPU_DEVICES" not in os.environ and not jax.distributed.is_initialized():
        simulate_devices(args, sizes)
    found = find_devices()
    if args.devices is not None and args.devices > len(found):
        raise ValueError(
            f"--devices {args.devices} is more than there are: {len(found)} x "
            f"{found[0].platform}; use {len(found)} or fewer."
        )
    if jax.process_count() > 1 and args.devices not in (None, len(found)):
        raise ValueError(
            f"--devices {args.devices} is not all of the {len(found)} devices of "
            f"{jax.process_count()} processes; leave it out, or start fewer processes."
        )
    return eqxshard.make_mesh(**sizes, devices=found[: args.devices])


def simulate_devices(args: Args, sizes: dict[str, int]) -> None:
    """Say how many CPU devices to make: it makes no difference to accelerators."""
    fixed = math.prod(size for size in sizes.values() if size > 0)
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    counts = range(fixed, cores + 1, fixed) if -1 in sizes.values() else ()
    simulated = max((n for n in counts if args.batch_size % n == 0), default=fixed)
    if args.devices is not None:
        simulated = args.devices
    if simulated > args.batch_size:
        raise ValueError(
            f"{simulated} devices are more than the {args.batch_size} examples of a batch; "
            "use fewer, or a larger --batch-size."
        )
    # Comes before JAX looks for devices.
    jax.config.update("jax_num_cpu_devices", simulated)


def find_devices() -> list[Any]:
    try:
        return jax.devices()
    # JAX asserts that there is a CUDA plugin, and says nothing where there is none.
    except (AssertionError, RuntimeError) as error:
        platforms = os.environ.get("JAX_PLATFORMS", "")
        reason = (
            " ".join(str(error).split()) or "the plugin that finds them is not installed"
        )
        raise ValueError(
            f"no devices for JAX_PLATFORMS={platforms}: {reason}; give another or unset "
            "it, or install JAX for the accelerator, as with '.[recipes,cuda12]'."
        ) from error


def parse_mesh(text: str) -> dict[str, Any]:
    sizes = {}
    for part in text.split(","):
        axis, _, size = part.strip().partition("=")
        choose("mesh axis", axis, AXES)
        if axis in sizes:
            raise ValueError(f"--mesh {text} gives {axis} twice; give it one size.")
        try:
            sizes[axis] = int(size)
        except ValueError:
            raise ValueError(
                f"--mesh {text} gives no size in {part!r}; write it like {axis}=2."
            ) from None
    return sizes


def make_optimizer(args: Args, *, steps: int) -> optax.GradientTransformation:
    make, rate = choose("optimizer", args.optimizer, OPTIMIZERS)
    rate = rate if args.learning_rate is None else args.learning_rate
    if not 0 < rate < math.inf:
        raise ValueError(f"--learning-rate {rate} is no rate; use a number above 0.")
    if steps >= 2**31:
        raise ValueError(f"--epochs {args.epochs} is {steps} steps, too many; use fewer.")
    rise = optax.linear_schedule(0.0, rate, steps // 20)
    fall = optax.linear_schedule(rate, rate / 100, steps - steps // 20)
    return make(optax.join_schedules([rise, fall], [steps // 20]))


def read_lines(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def summarize(lines: list[dict[str, Any]], examples: int) -> dict[str, Any]:
    """Accuracy and speed, from what was logged."""
    accuracies = [line["eval/accuracy"] for line in lines if "eval/accuracy" in line]
    seconds = [0.0] * len(accuracies)
    for line in lines:
        seconds[math.ceil(line["epoch"]) - 1] += line.get("train/seconds", 0.0)
    typical = statistics.median(seconds)
    return {
        "test_accuracy": accuracies[-1],
        "test_accuracy_by_epoch": accuracies,
        "seconds_per_epoch": typical,
        "images_per_second": examples / typical,
    }


def main() -> int:
    given = [
        "--resume=yes" if word == "--resume" and following.startswith("-") else word
        for word, following in itertools.pairwise([*sys.argv[1:], "-"])
    ]
    args = tyro.cli(Args, args=given, config=(tyro.conf.DisallowNone,))
    try:
        eqxshard.cache_compilations()
        eqxshard.initialize()
        last = train(args)
    except (ValueError, OSError, FloatingPointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            "stopped; what was logged and saved until now is kept: --resume goes on.",
            file=sys.stderr,
            flush=True,
        )
        # Not sys.exit: JAX 0.10 crashes at exit if a compilation was interrupted.
        os._exit(130)
    if last is not None:
        print(last)
    return 0


if __name__ == "__main__":
    eqxshard.distributed.leave(main())
