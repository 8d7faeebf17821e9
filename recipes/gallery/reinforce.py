"""A small RL loop: REINFORCE balances a pole. The examples of a batch are carts."""

from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from pictures import COLORS, figure

import eqxshard

TIME = 200


def push(cart, action):
    """The cart-pole of Barto, Sutton and Anderson (1983), 1/50 s later."""
    _, speed, angle, turn = cart
    force = jnp.where(action == 1, 10.0, -10.0)
    pull = (force + 0.05 * turn**2 * jnp.sin(angle)) / 1.1
    bent = 9.8 * jnp.sin(angle) - jnp.cos(angle) * pull
    bent = bent / (0.5 * (4 / 3 - 0.1 * jnp.cos(angle) ** 2 / 1.1))
    moved = pull - 0.05 * bent * jnp.cos(angle) / 1.1
    return cart + 0.02 * jnp.stack([speed, moved, turn, bent])


def play(policy, cart, choose):
    """An episode: what the cart was like, what it did, and whether the pole still stood."""

    def step(carry, time):
        cart, stood = carry
        action = choose(policy(cart), time)
        after = push(cart, action)
        stands = stood & (jnp.abs(after[0]) < 2.4) & (jnp.abs(after[2]) < 0.21)
        return (after, stands), (cart, action, stands)

    start = (cart, jnp.array(True))
    return jax.lax.scan(step, start, jnp.arange(TIME))[1]


def loss_fn(policy, batch, key):
    @jax.vmap
    def sampled(cart, key):
        def choose(logits, time):
            return jax.random.categorical(jax.random.fold_in(key, time), logits)

        return play(policy, cart, choose)

    carts, actions, stands = sampled(
        batch["cart"], jax.random.split(key, len(batch["cart"]))
    )
    gains = jnp.cumsum(stands[:, ::-1], axis=1)[:, ::-1]  # How long it still stands.
    # The mean is over the whole batch, on all devices.
    better = (gains - gains.mean(axis=0)) / (gains.std() + 1e-6)
    logits = jax.vmap(jax.vmap(policy))(jax.lax.stop_gradient(carts))
    surprise = optax.softmax_cross_entropy_with_integer_labels(logits, actions)
    length = stands.sum(axis=1)
    return (jax.lax.stop_gradient(better) * stands * surprise).mean(1), {"length": length}


def greedy(policy, batch):
    def choose(logits, time):
        return jnp.argmax(logits)

    return jax.vmap(lambda cart: play(policy, cart, choose))(batch["cart"])


def metric_fn(policy, batch):
    return {"length": greedy(policy, batch)[2].sum(axis=1)}


def make_carts(count, seed):
    carts = np.random.default_rng(seed).uniform(-0.05, 0.05, size=(count, 4))
    return eqxshard.data.ArraySource({"cart": np.float32(carts)}, unit="episodes")


def draw(path, history, episodes):
    """How long the pole stood during training, and what trained carts do."""
    lines = [line for line in history if "train/length" in line]
    carts = np.asarray(episodes[0])
    with figure(path, 1, 2, size=(7, 2.8)) as axes:
        left, right = axes[0]
        left.plot(
            [x["step"] for x in lines], [x["train/length"] for x in lines], color=COLORS[0]
        )
        left.set(title="steps that the pole stands", xlabel="update", ylim=(0, TIME + 5))
        right.plot(np.degrees(carts[:, :, 2].T), color=COLORS[1], linewidth=0.8)
        right.set(title="angle of eight poles (degrees)", xlabel="step", ylim=(-12, 12))


@dataclass(frozen=True)
class Args:
    """Learn to balance a pole for four seconds, 64 carts at a time."""

    run: eqxshard.RunConfig = eqxshard.RunConfig(
        batch_size=64, log_every=2, evaluate_every=30, save_every=30
    )


def main(args: Args) -> str:
    test_data = make_carts(64, args.run.seed + 1)
    run = eqxshard.train(
        lambda key: eqx.nn.MLP(4, 2, 32, depth=1, key=key),
        loss_fn,
        metric_fn,
        lambda steps: optax.adam(1e-2),
        make_carts(64 * 30, args.run.seed),
        test_data,
        config=args.run,
        steps=60,
    )
    trained = eqxshard.filter_jit(greedy)(run.state.model, test_data.gather(np.arange(8)))
    draw(run.folder / "pole.png", eqxshard.run.RunFolder(run.folder).history(), trained)
    return f"the pole stands {run.metrics['length']:.1f} of {TIME} steps | {run.title}"


if __name__ == "__main__":
    eqxshard.cli(main, Args)
