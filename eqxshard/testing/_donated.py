"""`assert_donated`: a step reuses the memory of the state that it is given."""

import warnings
from typing import Any

import jax
from jaxtyping import PyTree

from ..sharding._leaves import array_leaves, format_array, is_key


def assert_donated(step: Any, state: PyTree, /, *args: Any) -> None:
    """Check that a step reuses every buffer of the state that it is given.

    The step is called once, on copies, so the arguments can be used afterwards. The
    addresses of the results are then compared with those of the state, on each device.

    **Arguments:**

    - `step`: a train step, or any compiled function that donates its first argument.
    - `state`: its first argument: a PyTree of arrays on their devices.
    - `args`: the other arguments, such as a batch.

    **Raises:**

    `AssertionError` with the path, dtype and shape of each array of the state whose memory
    no result uses.

    !!! Example

        ```python
        eqxshard.testing.assert_donated(train_step, state, batch)
        ```
    """
    state, args = _copy(state), _copy(args)
    arrays = [
        (path, leaf, _buffers(leaf))
        for path, leaf in array_leaves(state)
        if isinstance(leaf, jax.Array) and leaf.size
    ]
    with warnings.catch_warnings():
        # The error below says more, and on several devices JAX does not notice.
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        out = step(state, *args)
    used = {
        buffer
        for leaf in jax.tree.leaves(out)
        if isinstance(leaf, jax.Array)
        for buffer in _buffers(leaf)
    }
    lost = [
        f"  {path or 'the array'}: {format_array(leaf)}\n"
        for path, leaf, buffers in arrays
        if not leaf.is_deleted() or not buffers <= used
    ]
    if lost:
        raise AssertionError(
            f"the memory of {len(lost)} of {len(arrays)} arrays of the state is not "
            f"reused:\n{''.join(lost)}Donate the state, and return each of its arrays with "
            "the same shape, dtype and sharding."
        )


def _copy(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, tree)


def _buffers(leaf: jax.Array) -> set[tuple[jax.Device, int]]:  # pyright: ignore[reportInvalidTypeForm]
    """The device and the address of each part of an array."""
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    shards = leaf.addressable_shards
    return {(shard.device, shard.data.unsafe_buffer_pointer()) for shard in shards}
