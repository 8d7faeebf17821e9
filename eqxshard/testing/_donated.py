"""Whether a step really uses the memory of the state that it is given again."""

import warnings
from typing import Any

import jax
from jaxtyping import PyTree

from ..sharding import is_key, leaf_path


def assert_donated(step: Any, state: PyTree, /, *args: Any) -> None:
    """Check that a step reuses every buffer of the state that it is given.

    The step is called once, on copies: what was given can be used afterwards. Where the
    results lie in memory is then compared to where the state lay, device by device.

    **Arguments:**

    - `step`: a train step, or any compiled function that donates its first argument.
    - `state`: its first argument: a PyTree of arrays on their devices.
    - `args`: the others, such as a batch.

    **Raises:**

    `AssertionError` with the path, type and shape of each array of the state whose memory
    is used for no result, and with what JAX warned of.

    !!! Example

        ```python
        eqxshard.testing.assert_donated(train_step, state, batch)
        ```
    """
    state, args = _copied(state), _copied(args)
    arrays = [
        (leaf_path(path), leaf, _buffers(leaf))
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if isinstance(leaf, jax.Array) and leaf.size
    ]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = step(state, *args)
    vain = [str(warning.message) for warning in caught if _of_donation(warning)]
    for warning in caught:
        if not _of_donation(warning):
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
    used = {
        buffer
        for leaf in jax.tree.leaves(out)
        if isinstance(leaf, jax.Array)
        for buffer in _buffers(leaf)
    }
    lost = [
        f"  {path or 'the array'}: {leaf.dtype}[{','.join(map(str, leaf.shape))}]\n"
        for path, leaf, buffers in arrays
        if not leaf.is_deleted() or not buffers <= used
    ]
    if lost or vain:
        warned = "".join(f"\nJAX warned: {message}" for message in vain)
        raise AssertionError(
            f"{len(lost)} of {len(arrays)} arrays of the state are not used again:\n"
            f"{''.join(lost)}Donate the state, and return each array of it with the shape, "
            f"the type and the sharding that it came with.{warned}"
        )


def _copied(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, tree)


def _of_donation(warning: warnings.WarningMessage) -> bool:
    return "donated" in str(warning.message)


def _buffers(leaf: jax.Array) -> set[tuple[jax.Device, int]]:  # pyright: ignore[reportInvalidTypeForm]
    """The memory of an array: on which device, and where."""
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    shards = leaf.addressable_shards
    return {(shard.device, shard.data.unsafe_buffer_pointer()) for shard in shards}
