"""`cross_entropy`: the losses of next tokens, without all logits in memory at once."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from .._errors import UsageError
from ..sharding._explicit import on_auto_axes
from ..sharding._mesh import automatic_axes, batch_axes
from ..sharding._placement import constrain
from ..transforms._dtypes import at_least_float32

_ANY = PartitionSpec.UNCONSTRAINED
#: The name of the arrays that the recomputed chunks keep.
_KEPT = "logsumexp"


@on_auto_axes(like="targets")
def cross_entropy(
    hidden: Float[Array, "*batch seq embed"],
    weight: Float[Array, "vocab embed"],
    targets: Int[Array, "*batch seq"],
    *,
    chunk: int = 256,
) -> Float[Array, "*batch seq"]:
    """The cross-entropy of each position's target under `softmax(hidden @ weight.T)`.

    The logits of a whole batch are often the largest array of a training step. Here those
    of only `chunk` positions of each sequence exist at a time: the sequence is computed in
    chunks, and in the backward pass the logits of each chunk are computed again. (A
    sequence that is not longer than a chunk is computed at once, and not again.)

    Products are computed in the dtype of `hidden`; the softmax and the sums in float32, or
    better.

    It works on any mesh, however the arrays are split. Where `weight` is split by
    vocabulary, each device computes its part of the logits and only sums over the
    vocabulary are communicated; where the sequence is split over `context`, each device
    computes chunks of its own part. The gradients of `weight` from all chunks are summed on
    each device before they are summed over devices. Call it with the whole batch for that:
    under `jax.vmap` they are summed over devices for each chunk.

    **Arguments:**

    - `hidden`: the outputs of the last layer.
    - `weight`: the output weights, a row for each token of the vocabulary; the embedding
        table if the two are tied.
    - `targets`: the token to predict at each position; where it is -1, the loss is 0 and
        has no gradient.
    - `chunk`: the most positions of each sequence whose logits exist at a time.

    **Returns:**

    The loss of each position, in float32 (in float64 if `hidden` is).

    **Raises:**

    `ValueError` if the shapes do not fit each other, or `chunk` is not positive.

    !!! Example

        ```python
        def loss_fn(model, batch, key):
            hidden = jax.vmap(model)(batch["tokens"])
            losses = eqxshard.nn.cross_entropy(hidden, model.output, batch["targets"])
            return jnp.mean(losses, axis=-1)
        ```
    """
    if chunk < 1:
        raise UsageError(
            f"chunk={chunk} must be at least 1; leave it out for the default size."
        )
    _check_shapes(hidden, weight, targets)
    # In 8 bits, the indices of a larger vocabulary would wrap around.
    targets = targets.astype(jnp.int32)
    *batch, seq, _ = hidden.shape
    of_batch = batch_axes(jax.sharding.get_abstract_mesh())
    devices, row_axes = _split(of_batch, math.prod(batch))
    parts, part_axes = _split(("context",), seq)
    length = seq // parts
    if length <= chunk:
        words = jnp.arange(len(weight), dtype=targets.dtype)
        return _losses(hidden, weight.astype(hidden.dtype), targets, words)
    count = -(-length // chunk)
    size = -(-length // count)

    def to_chunks(x: Array) -> Array:
        """To the dims `chunk device row part position ...`."""
        rest = x.shape[len(batch) + 1 :]
        x = x.reshape(devices, -1, parts, length, *rest)
        widths = [(0, 0)] * 3 + [(0, count * size - length)] + [(0, 0)] * len(rest)
        x = jnp.pad(x, widths).reshape(devices, -1, parts, count, size, *rest)
        x = jnp.moveaxis(x, 3, 0)
        return constrain(
            x, PartitionSpec(None, row_axes, None, part_axes, *[_ANY] * (x.ndim - 4))
        )

    # A copy for each device, so that the gradients of chunks are summed there, in float32.
    weight = jnp.broadcast_to(weight, (devices, parts, *weight.shape))
    weight = constrain(weight, PartitionSpec(row_axes, part_axes, _ANY, _ANY))
    narrow, wide = weight.astype(hidden.dtype), at_least_float32(weight)

    def body(_: None, chunk: tuple[Array, Array, Array]) -> tuple[None, Array]:
        number, hidden, targets = chunk
        # Made again for each chunk; otherwise JAX would materialize an index beside each
        # logit ahead of the loop.
        words = jnp.arange(len(weight[0, 0]), dtype=targets.dtype) + 0 * number
        losses = jax.vmap(_losses, in_axes=(1, 0, 1, None), out_axes=1)
        losses = jax.vmap(losses, in_axes=(0, 0, 0, None))
        return None, losses(hidden, _with_gradient_of(narrow, wide), targets, words)

    policy = jax.checkpoint_policies.save_only_these_names(_KEPT)
    # The scan itself keeps XLA from undoing the checkpoint.
    body = jax.checkpoint(body, policy=policy, prevent_cse=False)
    numbers = jnp.arange(count, dtype=targets.dtype)
    chunks = numbers, to_chunks(hidden), to_chunks(targets)
    losses = jnp.moveaxis(jax.lax.scan(body, None, chunks)[1], 0, 3)
    losses = losses.reshape(*losses.shape[:3], count * size)[..., :length]
    return losses.reshape(*batch, seq)


def _check_shapes(hidden: Array, weight: Array, targets: Array) -> None:
    embed = hidden.shape[-1] if hidden.ndim >= 2 else None
    if weight.shape[1:] != (embed,) or targets.shape != hidden.shape[:-1]:
        raise UsageError(
            f"cross_entropy: hidden, weight and targets have the shapes {hidden.shape}, "
            f"{weight.shape} and {targets.shape}; give hidden (*batch, seq, embed), weight "
            "(vocab, embed) and targets (*batch, seq)."
        )


def _losses(
    hidden: Float[Array, "*batch seq embed"],
    weight: Float[Array, "vocab embed"],
    targets: Int[Array, "*batch seq"],
    words: Int[Array, " vocab"],
) -> Float[Array, "*batch seq"]:
    logits = jnp.einsum("...e,ve->...v", hidden, weight)
    return _negative_log_likelihood(logits, targets, words)


@jax.custom_jvp
def _with_gradient_of(narrow: Array, wide: Array) -> Array:
    """The array `narrow`, whose gradient goes to `wide`: the same in a wider dtype."""
    del wide
    return narrow


@_with_gradient_of.defjvp
def _(primals: tuple[Array, Array], tangents: tuple[Any, Array]) -> tuple[Array, Array]:
    return primals[0], tangents[1].astype(primals[0].dtype)


@jax.custom_jvp
def _negative_log_likelihood(
    logits: Float[Array, "*batch vocab"],
    targets: Int[Array, "*batch"],
    words: Int[Array, " vocab"],
) -> Float[Array, "*batch"]:
    return _nll(logits, targets, words)[0]


@_negative_log_likelihood.defjvp
def _(
    primals: tuple[Array, Array, Array], tangents: tuple[Array, Any, Any]
) -> tuple[Array, Array]:
    (logits, targets, words), (dlogits, *_) = primals, tangents
    losses, logsumexp = _nll(logits, targets, words)
    # The gradient needs only this beside the logits, which are computed again.
    logsumexp = checkpoint_name(logsumexp, _KEPT)
    softmax = jnp.exp(at_least_float32(logits) - logsumexp[..., None])
    gradient = jnp.where(_is_target(targets, words), softmax - 1.0, softmax)
    dlosses = jnp.sum(gradient * at_least_float32(dlogits), axis=-1)
    return losses, jnp.where(targets >= 0, dlosses, 0.0)


def _nll(logits: Array, targets: Array, words: Array) -> tuple[Array, Array]:
    """The losses, and the logsumexp of the logits."""
    logits = at_least_float32(logits)
    logsumexp = jax.nn.logsumexp(logits, axis=-1)
    # A sum, because picking one logit would gather all of them where they are split.
    one_hot = _is_target(targets, words).astype(logits.dtype)
    at_target = jnp.sum(logits * one_hot, axis=-1)
    return jnp.where(targets >= 0, logsumexp - at_target, 0.0), logsumexp


def _is_target(targets: Array, words: Array) -> Array:
    return targets[..., None] == jnp.expand_dims(words, tuple(range(targets.ndim)))


def _split(axes: tuple[str, ...], size: int) -> tuple[int, tuple[str, ...] | None]:
    """The number of parts that mesh axes split a dim into, and these axes, if any do."""
    found = automatic_axes(axes, size)
    sizes = jax.sharding.get_abstract_mesh().shape
    count = math.prod(sizes[axis] for axis in found)
    return (1, None) if count == 1 else (count, found)
