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
    _, speed, angle, angular_speed = cart
    sine, cosine = jnp.sin(angle), jnp.cos(angle)
    force = jnp.where(action == 1, 10.0, -10.0)
    pull = (force + 0.05 * angular_speed**2 * sine) / 1.1
    angular_acceleration = 9.8 * sine - cosine * pull
    angular_acceleration /= 0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1)
    acceleration = pull - 0.05 * angular_acceleration * cosine / 1.1
    change = jnp.stack([speed, acceleration, angular_speed, angular_acceleration])
    return cart + 0.02 * change


def play(policy, cart, choose):
    """An episode: the states of the cart, its actions, and if the pole still stands."""

    def step(carry, time):
        cart, stood = carry
        action = choose(policy(cart), time)
        next_cart = push(cart, action)
        position, _, angle, _ = next_cart
        stands = stood & (jnp.abs(position) < 2.4) & (jnp.abs(angle) < 0.21)
        return (next_cart, stands), (cart, action, stands)

    start = (cart, jnp.array(True))
    _, episode = jax.lax.scan(step, start, jnp.arange(TIME))
    return episode


def loss_fn(policy, batch, key):
    def sample_episode(cart, key):
        def choose(logits, time):
            return jax.random.categorical(jax.random.fold_in(key, time), logits)

        return play(policy, cart, choose)

    keys = jax.random.split(key, len(batch["cart"]))
    carts, actions, stands = jax.vmap(sample_episode)(batch["cart"], keys)
    # The return of each step: how long the pole still stands.
    returns = jnp.cumsum(stands[:, ::-1], axis=1)[:, ::-1]
    # The baseline is a mean over the whole batch, on all devices.
    advantages = (returns - returns.mean(axis=0)) / (returns.std() + 1e-6)
    logits = jax.vmap(jax.vmap(policy))(jax.lax.stop_gradient(carts))
    log_losses = optax.softmax_cross_entropy_with_integer_labels(logits, actions)
    losses = jax.lax.stop_gradient(advantages) * stands * log_losses
    return losses.mean(axis=1), {"length": stands.sum(axis=1)}


def greedy(policy, batch):
    def choose(logits, time):
        return jnp.argmax(logits)

    return jax.vmap(lambda cart: play(policy, cart, choose))(batch["cart"])


def metric_fn(policy, batch):
    _, _, stands = greedy(policy, batch)
    return {"length": stands.sum(axis=1)}


def make_carts(count, seed):
    carts = np.random.default_rng(seed).uniform(-0.05, 0.05, size=(count, 4))
    return eqxshard.data.ArraySource({"cart": np.float32(carts)}, unit="episodes")


def draw(path, history, episodes):
    """Draw how long the pole stood during training, and its angles at the end."""
    reports = [line for line in history if "train/length" in line]
    steps = [report["step"] for report in reports]
    lengths = [report["train/length"] for report in reports]
    carts, _, _ = episodes
    angles = np.degrees(np.asarray(carts)[:, :, 2])
    with figure(path, 1, 2, size=(7, 2.8)) as axes:
        left, right = axes[0]
        left.plot(steps, lengths, color=COLORS[0])
        left.set(title="steps that the pole stands", xlabel="update", ylim=(0, TIME + 5))
        right.plot(angles.T, color=COLORS[1], linewidth=0.8)
        right.set(title="angle of eight poles (degrees)", xlabel="step", ylim=(-12, 12))


def make_policy(key):
    return eqx.nn.MLP(4, 2, 32, depth=1, key=key)


@dataclass(frozen=True)
class Args:
    """Learn to balance a pole for four seconds, 64 carts at a time."""

    run: eqxshard.RunConfig = eqxshard.RunConfig(
        batch_size=64, log_every=2, evaluate_every=30, save_every=30
    )


def main(args: Args) -> str:
    test_data = make_carts(64, args.run.seed + 1)
    run = eqxshard.train(
        make_policy,
        loss_fn,
        metric_fn,
        optax.adam(1e-2),
        make_carts(64 * 30, args.run.seed),
        test_data,
        config=args.run,
        steps=60,
    )
    few = test_data.gather(np.arange(8))
    episodes = eqxshard.filter_jit(greedy)(run.state.model, few)
    history = eqxshard.run.RunFolder(run.folder).history()
    draw(run.folder / "pole.png", history, episodes)
    return f"the pole stands {run.metrics['length']:.1f} of {TIME} steps | {run.title}"


if __name__ == "__main__":
    eqxshard.cli(main, Args)
