"""The work of an instruction: floating-point operations by dtype, and bytes of memory."""

import functools
import math
import re
from collections import Counter
from collections.abc import Iterable

from ..compiled._hlo import Instruction, Module, Shape

#: The names of NumPy for the dtypes of XLA that have a peak.
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

_DIMS = re.compile(r'"?lhs_contracting_dim(?:ension)?s"?[=:][\[{]([\d," ]*)[\]}]')


class Costs:
    """The costs of a module's instructions."""

    def __init__(self, module: Module):
        self._module = module
        self._uses: dict[str, dict[str, list[Instruction]]] = {}

    def flops(self, instruction: Instruction) -> Counter[str]:
        """The operations of matrix products and convolutions, by the dtype of a factor."""
        if instruction.opcode == "fusion":
            total = Counter[str]()
            for _, name in instruction.called():
                for inside in self._module.computations.get(name, ()):
                    total.update(self.flops(inside))
            return total
        shapes = [shape for each in self.operand_shapes(instruction) for shape in each]
        if not shapes:
            return Counter()
        return Counter({DTYPES.get(shapes[0].dtype, ""): _flops(instruction, shapes)})

    def bytes(self, instruction: Instruction) -> int:
        """The bytes that an instruction reads and writes in the device's memory."""
        if instruction.opcode in FREE or instruction.opcode.endswith(("-start", "-done")):
            return 0
        if instruction.opcode != "fusion":
            return self._bytes_of_one(instruction)
        inside = next((name for _, name in instruction.called()), "")
        reads = sum(
            self._read(inside, number, _bytes(shapes))
            for number, shapes in enumerate(self.operand_shapes(instruction))
        )
        return reads + self._written(inside, instruction)

    def operand_shapes(self, instruction: Instruction) -> list[tuple[Shape, ...]]:
        """The types of an instruction's operands."""
        found = (
            self._module.by_name.get((instruction.computation, name))
            for name in instruction.operands
        )
        return [() if operand is None else operand.shapes for operand in found]

    def _bytes_of_one(self, instruction: Instruction) -> int:
        operands = [_bytes(shapes) for shapes in self.operand_shapes(instruction)]
        if instruction.opcode in ("dynamic-slice", "slice", "gather"):
            return 2 * _bytes(instruction.shapes)
        if instruction.opcode in ("dynamic-update-slice", "scatter"):
            return 2 * operands[-1 if instruction.opcode == "scatter" else 1]
        return sum(operands) + _bytes(instruction.shapes)

    def _read(self, computation: str, number: int, whole: int) -> int:
        """What a fusion reads of an operand: of a slice, only that."""
        instructions = self._module.computations.get(computation, ())
        parameters = (x for x in instructions if x.opcode == "parameter")
        name = next((x.name for x in parameters if x.content == str(number)), None)
        if name is None:
            return whole
        uses = list(self._users(computation, name))
        sliced = 0
        for source, user in uses:
            if user.operands[:1] != (source,):
                return whole
            if user.opcode in ("dynamic-slice", "slice", "gather"):
                sliced += _bytes(user.shapes)
            elif user.opcode not in ("dynamic-update-slice", "scatter"):
                return whole
        return min(sliced, whole)

    def _written(self, computation: str, fusion: Instruction) -> int:
        """What a fusion writes: of an update in place, only that."""
        instructions = self._module.computations.get(computation, ())
        if not instructions:
            return _bytes(fusion.shapes)
        root = instructions[-1]
        names = root.operands if root.opcode == "tuple" else (root.name,)
        total = 0
        for name in names:
            result = self._module.by_name[computation, name]
            while result.opcode == "bitcast":
                result = self._module.by_name[computation, result.operands[0]]
            if result.opcode in ("dynamic-update-slice", "scatter"):
                updates = self.operand_shapes(result)
                total += _bytes(updates[-1 if result.opcode == "scatter" else 1])
            else:
                total += _bytes(result.shapes)
        return total

    def _users(self, computation: str, name: str) -> Iterable[tuple[str, Instruction]]:
        """The users of a value, also of what is a view of it."""
        if computation not in self._uses:
            table: dict[str, list[Instruction]] = {}
            for instruction in self._module.computations[computation]:
                for operand in instruction.operands:
                    table.setdefault(operand, []).append(instruction)
            self._uses[computation] = table
        for user in self._uses[computation].get(name, ()):
            if user.opcode == "bitcast":
                yield from self._users(computation, user.name)
            else:
                yield name, user


def count_flops(module: Module) -> dict[str, float]:
    """The operations of one step on one device, by dtype.

    Of the branches of a condition, those of the one that has the most.
    """
    costs = Costs(module)

    @functools.cache
    def inside(computation: str) -> Counter[str]:
        total = Counter[str]()
        for instruction in module.computations.get(computation, ()):
            total.update(costs.flops(instruction))
            if instruction.opcode in ("fusion", "custom-call"):  # All of it was counted.
                continue
            parts = [inside(name) for _, name in instruction.called()]
            if instruction.opcode == "conditional":
                parts = [max(parts, key=Counter.total, default=Counter())]
            times = module.trips(instruction)
            for part in parts:
                for dtype, count in part.items():
                    total[dtype] += count * (1 if times is None else times)
        return total

    counts = inside(module.entry)
    return {dtype: float(count) for dtype, count in counts.items() if count}


def _flops(instruction: Instruction, shapes: list[Shape]) -> int:
    opcode, attributes = instruction.opcode, instruction.attributes
    if opcode == "dot":
        return 2 * _size(instruction.shapes[:1]) * _contracted(attributes, shapes[0])
    if opcode == "convolution":
        return _convolution(attributes, shapes[1], instruction.shapes[0])
    if opcode != "custom-call":
        return 0
    if "__cudnn$fmha" in attributes:
        return _attention(attributes, shapes[0])
    if "__cudnn$conv" in attributes:
        return _convolution_by_cudnn(attributes, shapes, instruction.shapes[0])
    if "contracting_dim" in attributes:  # cuBLAS and its relatives.
        return 2 * _size(instruction.shapes[:1]) * _contracted(attributes, shapes[0])
    return 0


def _contracted(attributes: str, lhs: Shape) -> int:
    found = _DIMS.search(attributes)
    dims = [int(n) for n in re.findall(r"\d+", found[1])] if found else []
    return math.prod(lhs.dims[dim] for dim in dims)


def _convolution(attributes: str, kernel: Shape, out: Shape) -> int:
    """For each output a product with the kernel of one output feature."""
    labels = re.search(r"dim_labels=\w+_(\w+)->", attributes)
    features = kernel.dims[labels[1].index("o")] if labels else 1
    return 2 * _size((out,)) * _size((kernel,)) // max(features, 1)


def _convolution_by_cudnn(attributes: str, shapes: list[Shape], out: Shape) -> int:
    """Of a convolution or one of its gradients, which have as many operations.

    Their labels are those of the convolution, whose kernel and result are among the arrays.
    """
    lhs, rhs = shapes[:2]
    if "BackwardFilter" in attributes:
        return _convolution(attributes, out, rhs)
    if "BackwardInput" in attributes:
        return _convolution(attributes, rhs, lhs)
    return _convolution(attributes, rhs, out)


def _attention(attributes: str, query: Shape) -> int:
    """Two products forward, five backward (one of them again); half if it is causal."""
    scores = re.search(
        r'"intermediate_tensor_shape".*?"dimensions": ?\[(.*?)\]', attributes
    )
    if scores is None:
        return 0
    size = math.prod(int(n) for n in re.findall(r"\d+", scores[1]))
    products = 5 if "Backward" in attributes else 2
    return products * 2 * size * query.dims[-1] // (2 if "CAUSAL" in attributes else 1)


def _size(shapes: Iterable[Shape]) -> int:
    return sum(math.prod(shape.dims) for shape in shapes)


def _bytes(shapes: Iterable[Shape]) -> int:
    return sum(shape.bytes for shape in shapes)
