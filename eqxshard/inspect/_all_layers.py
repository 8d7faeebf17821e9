"""Lint for stacked layers of a user's own function that are all gathered at once.

A step of ours gathers each layer inside the loop over layers.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

from ..compiled._causes import plain_dims
from ..compiled._communication import Operation
from ..compiled._findings import Finding
from ..compiled._lint_text import TextLint
from ..compiled._lowered import Input
from ..sharding._spec import axes_of


def lint_layers(text: TextLint, inputs: Sequence[Input]) -> Iterator[Finding]:
    """The findings of kind `all-layers`: layers that are gathered before their loop.

    **Arguments:**

    - `text`: the compiled function.
    - `inputs`: the arrays that the function takes.
    """
    by_name = {each.name: each for each in inputs}
    for operation in text.gathers():
        for name in text.causes.leaves(operation):
            leaf = by_name[name]
            # Stacked vectors cost little, and XLA may take them out of the loop.
            layers = leaf.shape[0] if len(leaf.shape) > 2 else 1
            if layers > 1 and leaf.shape in text.scanned and _has(operation, leaf, text):
                frame = text.causes.frame(operation, of_use=True)
                yield Finding(
                    "all-layers",
                    name,
                    frame and frame.place,
                    f"{name} {leaf.shape} is gathered for all {layers} layers "
                    "at once. Use eqxshard.scan_layers instead of jax.lax.scan, on the "
                    "model's own arrays; use the arrays of a layer only in that layer; and "
                    "use a rule that does not split the dim of layers. If the scan is a "
                    "library's, split these arrays over an axis that does not split the "
                    "batch, such as tensor, or leave them as they are if they fit.",
                )


def _has(operation: Operation, leaf: Input, text: TextLint) -> bool:
    """True if all layers of an array are among the results of a gather."""
    gathered = operation.axes(text.sizes) or text.sizes.keys()
    whole = [
        size // math.prod(text.sizes[x] for x in axes_of(entry) if x not in gathered)
        for size, entry in itertools.zip_longest(leaf.shape, leaf.spec or ())
    ]
    # Compilers combine the gathers of several arrays, and join the dims of an array.
    is_joined = len(operation.shapes) == 1
    return any(
        plain_dims(shape.dims) == plain_dims(whole)
        or (is_joined and math.prod(shape.dims) == math.prod(whole))
        for shape in operation.shapes
    )
