"""Stacked layers of a function of the user's own that are all gathered at once.

A step of ours gathers each layer in the loop that takes it.
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
    - `inputs`: the arrays that it takes.
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
                    "model's own arrays; the arrays of a layer in that layer alone; and a "
                    "rule that does not split the dim of layers. Where a library scans "
                    "inside of itself, split these arrays over an axis that does not split "
                    "the batch, such as tensor, or leave them as they are if they fit.",
                )


def _has(operation: Operation, leaf: Input, text: TextLint) -> bool:
    """Whether all layers of an array are among the results of a gather."""
    gathered = operation.axes(text.sizes) or text.sizes.keys()
    whole = [
        size // math.prod(text.sizes[x] for x in axes_of(entry) if x not in gathered)
        for size, entry in itertools.zip_longest(leaf.shape, leaf.spec or ())
    ]
    # Compilers combine the gathers of several arrays, and join the dims of one.
    is_joined = len(operation.shapes) == 1
    return any(
        plain_dims(shape.dims) == plain_dims(whole)
        or (is_joined and math.prod(shape.dims) == math.prod(whole))
        for shape in operation.shapes
    )
