"""`rowwise`: a function of rows, on arrays of any number of dims."""

import math
from collections.abc import Callable

import jax
from jaxtyping import Array, Float


def rowwise(
    fn: Callable[[Float[Array, "rows features"]], Float[Array, "rows outputs"]],
    x: Float[Array, "*batch features"],
) -> Float[Array, "*batch outputs"]:
    """Apply a function of rows, such as a perceptron, to all positions of all sequences.

    The result is that of `fn(x)`, and the step may be faster: for the gradient of a
    weight, the compiler for CPUs copies an array of three dims into another order, often
    together with the gradient of an activation, element by element, which takes longer
    than the product itself. On a mesh that splits sequences over `context`, rows of
    several dims cannot be one dim, so there `fn` gets `x` as it is.

    **Arguments:**

    - `fn`: a function that treats each row alone, and takes arrays of any number of dims.
    - `x`: under `jax.vmap`, the rows of one example.

    **Returns:**

    An array of the shape of `x`, but for its last dim.

    !!! Example

        ```python
        y = eqxshard.nn.rowwise(self.mlp, x)
        ```
    """
    if jax.sharding.get_abstract_mesh().shape.get("context", 1) > 1:
        return fn(x)
    *batch, features = x.shape
    y = fn(x.reshape(math.prod(batch), features))
    return y.reshape(*batch, *y.shape[1:])
