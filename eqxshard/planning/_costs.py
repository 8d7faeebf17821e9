"""The work of an instruction: floating-point operations by dtype, and bytes of memory."""

import functools
import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from .._jax import REMATTED
from ..compiled._hlo import Instruction, Module, Shape

#: NumPy's names of XLA's dtypes, for those that may have a peak.
DTYPES = {
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
    "s8": "int8",
}

#: Instructions that cost nothing themselves; the bodies of some are counted instead.
FREE = {
    "parameter",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "constant",
    "after-all",
    "partition-id",
    "replica-id",
    "opt-barrier",
    "while",
    "conditional",
    "call",
    "add-dependency",
}
#: Operations that read only a part of their first operand, or write only a part of it.
_READS_PART = ("dynamic-slice", "slice", "gather")
_WRITES_PART = ("dynamic-update-slice", "scatter")

#: A part of the names of instructions that XLA computes again to save memory. (What
#: `jax.checkpoint` computes again has `REMATTED` in the names of its operations.)
_XLA_REMAT = ".remat"

_DIMS = re.compile(r'"?lhs_contracting_dim(?:ension)?s"?[=:][\[{]([\d," ]*)[\]}]')


class Product(NamedTuple):
    """A matrix product, a convolution or fused attention.

    - `dtype`: NumPy's name of the dtype of a factor; empty if it is not in `DTYPES`.
    - `flops`: the number of its floating-point operations.
    - `again`: how many of them repeat earlier ones, to save memory.
    - `fused`: whether it is fused attention.
    - `sizes`: of a matrix product, the rows and columns of a result, the size of the dim
        that is summed over, and the number of results.
    """

    dtype: str
    flops: int
    again: int
    fused: bool
    sizes: tuple[float, float, float, float] | None


class Costs:
    """The costs of a module's instructions."""

    def __init__(self, module: Module):
        self._module = module

    def flops(self, instruction: Instruction, again: bool = True) -> Counter[str]:
        """The operations of matrix products and convolutions, by the dtype of a factor.

        **Arguments:**

        - `again`: whether operations count that repeat earlier ones, to save memory.
        """
        total = Counter[str]()
        for product in self.products(instruction):
            total[product.dtype] += product.flops - (0 if again else product.again)
        return total

    def products(self, instruction: Instruction) -> Iterator[Product]:
        """The matrix products and convolutions of an instruction, or inside a fusion."""
        by_xla = _XLA_REMAT in instruction.name
        if instruction.opcode == "fusion":
            for _, name in instruction.called():
                for inside in self._module.computations.get(name, ()):
                    for each in self.products(inside):
                        yield each._replace(again=each.flops) if by_xla else each
            return
        shapes = [s for x in self._module.operands(instruction) for s in x.shapes]
        if shapes and (flops := _flops(instruction, shapes)):
            dtype = DTYPES.get(shapes[0].dtype, "")
            fused = "__cudnn$fmha" in instruction.attributes
            again = flops if by_xla or REMATTED in instruction.op_name else 0
            if fused and "Backward" in instruction.attributes:
                again = max(again, flops // 5)
            sizes = None if fused else _sizes(instruction, shapes, flops)
            yield Product(dtype, flops, again, fused, sizes)

    def bytes(self, instruction: Instruction) -> int:
        """The bytes that an instruction reads and writes in the device's memory."""
        if instruction.opcode in FREE or instruction.opcode.endswith(("-start", "-done")):
            return 0
        operands = self._module.operands(instruction)
        if instruction.opcode in _READS_PART:
            return 2 * _bytes(instruction)
        if instruction.opcode in _WRITES_PART:
            return 2 * self._update(instruction)
        if instruction.opcode != "fusion":
            return sum(map(_bytes, operands)) + _bytes(instruction)
        inside = self._module.computations.get(dict(instruction.called())["calls"], ())
        parameters = {x.content: x for x in inside if x.opcode == "parameter"}
        reads = sum(
            self._read(parameters.get(str(number)), _bytes(operand))
            for number, operand in enumerate(operands)
        )
        return reads + (self._written(inside[-1]) if inside else _bytes(instruction))

    def _update(self, instruction: Instruction) -> int:
        """The bytes that are written into an array in place."""
        operands = self._module.operands(instruction)
        return _bytes(operands[-1 if instruction.opcode == "scatter" else 1])

    def _read(self, parameter: Instruction | None, whole: int) -> int:
        """The bytes that a fusion reads of an operand: if it slices it, only the slices."""
        if parameter is None:
            return whole
        sliced = 0
        for source, user in self._users(parameter):
            if user.operands[:1] != (source.name,):
                return whole
            if user.opcode in _READS_PART:
                sliced += _bytes(user)
            elif user.opcode not in _WRITES_PART:
                return whole
        return min(sliced, whole)

    def _written(self, root: Instruction) -> int:
        """The bytes that a fusion writes: for an update in place, only the update."""
        if root.opcode == "tuple":
            return sum(map(self._written, self._module.operands(root)))
        if root.opcode == "bitcast":
            return self._written(self._module.operands(root)[0])
        return self._update(root) if root.opcode in _WRITES_PART else _bytes(root)

    def _users(self, value: Instruction) -> Iterator[tuple[Instruction, Instruction]]:
        """Pairs of the value, or a view of it, and an instruction that takes that."""
        for user in self._module.takers(value):
            if user.opcode == "bitcast":
                yield from self._users(user)
            else:
                yield value, user


def count_flops(module: Module, *, again: bool = True) -> dict[str, float]:
    """The operations of one step on one device, by dtype.

    Of the branches of a conditional, the one with the most operations counts.

    **Arguments:**

    - `again`: whether operations count that repeat earlier ones, to save memory.
    """
    costs = Costs(module)

    @functools.cache
    def inside(computation: str) -> Counter[str]:
        total = Counter[str]()
        for instruction in module.computations.get(computation, ()):
            total.update(costs.flops(instruction, again))
            if instruction.opcode not in ("while", "call", "conditional"):
                continue
            parts = [inside(name) for _, name in instruction.called()]
            most = max(parts, key=Counter.total, default=Counter[str]())
            times = module.trips(instruction) or 1
            total.update({dtype: times * count for dtype, count in most.items()})
        return total

    return {dtype: float(n) for dtype, n in inside(module.entry).items() if n}


def _flops(instruction: Instruction, shapes: list[Shape]) -> int:
    opcode, attributes = instruction.opcode, instruction.attributes
    if opcode == "convolution":
        return _convolution(attributes, shapes[1], instruction.shapes[0])
    if "__cudnn$fmha" in attributes:
        return _attention(attributes, shapes[0])
    if "__cudnn$conv" in attributes:
        return _convolution_by_cudnn(attributes, shapes, instruction.shapes[0])
    # Custom calls with contracting dims are those of cuBLAS and its relatives.
    found = _DIMS.search(attributes) if opcode in ("dot", "custom-call") else None
    if found is None:
        return 0
    contracted = (shapes[0].dims[int(dim)] for dim in re.findall(r"\d+", found[1]))
    return 2 * _size(instruction.shapes[0]) * math.prod(contracted)


def _sizes(
    instruction: Instruction, factors: list[Shape], flops: int
) -> tuple[float, float, float, float] | None:
    """The rows, columns, depth and batch of a product, from the sizes of its arrays."""
    if len(factors) < 2 or "dim_labels" in instruction.attributes:
        return None
    left, right, out = map(_size, (*factors[:2], instruction.shapes[0]))
    depth = flops / (2 * out)
    batch = max(left * right / (depth**2 * out), 1.0)
    return left / (batch * depth), right / (batch * depth), depth, batch


def _convolution(attributes: str, kernel: Shape, out: Shape) -> int:
    """The operations of a convolution: each output is a product with part of the kernel."""
    labels = re.search(r"dim_labels=\w+_(\w+)->", attributes)
    features = kernel.dims[labels[1].index("o")] if labels else 1
    return 2 * _size(out) * _size(kernel) // max(features, 1)


def _convolution_by_cudnn(attributes: str, shapes: list[Shape], out: Shape) -> int:
    """The operations of a convolution or of one of its gradients, which have as many.

    Their labels are those of the convolution, whose kernel and result are among the arrays.
    """
    lhs, rhs = shapes[:2]
    if "BackwardFilter" in attributes:
        return _convolution(attributes, out, rhs)
    if "BackwardInput" in attributes:
        return _convolution(attributes, rhs, lhs)
    return _convolution(attributes, rhs, out)


def _attention(attributes: str, query: Shape) -> int:
    """The operations of fused attention: two products forward, five backward.

    (One of the five repeats a product of the forward pass.) If it is causal, a query sees
    half of the keys on average, or those in its window.
    """
    scores = re.search(
        r'"intermediate_tensor_shape".*?"dimensions": ?\[(.*?)\]', attributes
    )
    if scores is None:
        return 0
    *rows, keys = (int(n) for n in re.findall(r"\d+", scores[1]))
    found = re.search(r'"sliding_window_length": ?"?([1-9]\d*)', attributes)
    window = min(int(found[1]), keys) if found else keys
    seen = window - window**2 / (2 * keys) if "CAUSAL" in attributes else keys
    products = 5 if "Backward" in attributes else 2
    return int(products * 2 * math.prod(rows) * seen * query.dims[-1])


def _size(shape: Shape) -> int:
    return math.prod(shape.dims)


def _bytes(value: Instruction) -> int:
    return sum(shape.bytes for shape in value.shapes)
