"""A lowered function: its inputs, its mesh, and those of the inputs that are a batch."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .._errors import UsageError
from .._jax import ir
from ..sharding._spec import axes_of

#: A mesh, `<["data"=2, "fsdp"=4]>`, and a sharding, `<@mesh, [{"data", "fsdp"}, {}]>`.
_AXIS = re.compile(r'"([^"]+)"=(\d+)')
_DIMS = re.compile(r"<@\w+, \[([^\]]*)\]")
#: `manual_axes={"pipe"}`, along which `shard_map` splits.
_MANUAL = re.compile(r"manual_axes=\{([^}]*)\}")
_TYPE = re.compile(r"tensor<((?:\d+x)*)(.+)>")
_DTYPES = {"i1": "bool", "complex<f32>": "complex64", "complex<f64>": "complex128"}


@dataclass(frozen=True)
class Input:
    """An array that a lowered function takes.

    - `number`: its index among the parameters of the program.
    - `name`: what the function calls it, such as `params['weight']`.
    - `shape`, `dtype`: those of the whole array.
    - `spec`: how it is split; `None` if that is left to the compiler.
    - `donated`: whether its memory may be reused.
    """

    number: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec | None
    donated: bool

    @property
    def argument(self) -> str:
        """The argument of the function that it is a part of: `params`."""
        return re.split(r"[.\[]", self.name)[0]

    @property
    def bytes(self) -> int:
        """The bytes of the whole array."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class LoweredStep:
    """The facts in the text of a lowered function.

    - `name`: the name of the function.
    - `devices`: the number of devices.
    - `sizes`: the sizes of the axes of its mesh; empty if it has none.
    - `inputs`: the arrays that it takes and uses, in their order.
    - `returned`: the types of the arrays that it returns, as shapes and dtypes.
    """

    name: str
    devices: int
    sizes: Mapping[str, int]
    inputs: tuple[Input, ...]
    returned: frozenset[tuple[tuple[int, ...], str]]

    @property
    def batch(self) -> tuple[Input, ...]:
        """The arrays of its batch, as far as that is certain.

        They are those arguments of a training step that it does not return in some new
        form, and whose arrays are split by nothing but their rows, all in the same way.
        """
        groups: dict[str, list[Input]] = {}
        for each in self.inputs:
            groups.setdefault(each.argument, []).append(each)
        kept = {name for name, arrays in groups.items() if any(map(self.is_kept, arrays))}
        found = [
            x
            for name, arrays in groups.items()
            if kept and name not in kept and all(map(_row_axes, arrays))
            for x in arrays
        ]
        return tuple(found) if len({(x.shape[0], _row_axes(x)) for x in found}) == 1 else ()

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes that its batch is split over."""
        return _row_axes(self.batch[0]) if self.batch else ()

    def is_kept(self, array: Input) -> bool:
        """True if an array belongs to the state: donated, or returned in a new form."""
        is_state = array.shape != () and (array.shape, array.dtype) in self.returned
        return array.donated or is_state


def _row_axes(array: Input) -> tuple[str, ...]:
    """The axes that the rows of an array are split over, if nothing else is split."""
    rows, *rest = (axes_of(entry) for entry in array.spec or ((),))
    return () if any(rest) else tuple(rows)


def read_lowered(lowered: jax.stages.Lowered) -> LoweredStep:
    """Read the inputs and the mesh of a lowered function."""
    module: Any = lowered.compiler_ir("stablehlo")
    assert module is not None  # JAX has this form of everything that it lowers.
    attributes = module.operation.attributes
    devices = math.prod(
        ir.IntegerAttr(attributes[f"mhlo.num_{what}"]).value
        for what in ("partitions", "replicas")
    )
    sizes = dict[str, int]()
    for op in module.body.operations:
        if op.operation.name == "sdy.mesh" and not sizes:
            found = {name: int(n) for name, n in _AXIS.findall(str(op.attributes["mesh"]))}
            # JAX says one device if the function was only traced under an abstract mesh.
            if devices in (1, math.prod(found.values())):
                sizes, devices = found, math.prod(found.values())
    main = find_main(module)
    inputs = tuple(
        _input(number, argument, main.arg_attrs[number])
        for number, argument in enumerate(main.arguments)
        if _is_array(argument.type)
    )
    return LoweredStep(
        name=_text(attributes["sym_name"]),
        devices=devices,
        sizes=sizes,
        inputs=inputs,
        returned=frozenset(
            _shape_and_dtype(each) for each in main.type.results if _is_array(each)
        ),
    )


def unsplit_axes(axes: Iterable[str], lower: Callable[[], jax.stages.Lowered]) -> list[str]:
    """The axes, of those given, over which a function splits nothing.

    **Arguments:**

    - `axes`: axes of its mesh.
    - `lower`: lowers the function. It is only called if there are axes.
    """
    names = list(axes)
    if not names:
        return names
    text = lower().as_text()
    found = _DIMS.findall(text)
    if "partition_id" in text:  # A device may choose its part of the work by itself.
        found += _MANUAL.findall(text)
    return [axis for axis in names if not any(f'"{axis}"' in dims for dims in found)]


def find_main(module: Any) -> Any:
    """The function that a module runs."""
    for op in module.body.operations:
        if "sym_name" in op.attributes and _text(op.attributes["sym_name"]) == "main":
            return op
    raise UsageError("the module has no function main; give what jax.jit lowers.")


def _input(number: int, argument: Any, attributes: Any) -> Input:
    name = re.fullmatch(r'loc\("(.*)"(?:\(.*\))?\)', str(argument.location))
    found = "sdy.sharding" in attributes
    sharding = _DIMS.search(str(attributes["sdy.sharding"])) if found else None
    spec = None
    if sharding is not None:
        dims = re.findall(r"\{([^}]*)\}", sharding[1])
        axes = [tuple(re.findall(r'"([^"]+)"', dim)) for dim in dims]
        while axes and not axes[-1]:
            axes.pop()
        spec = PartitionSpec(*(names or None for names in axes))
    shape, dtype = _shape_and_dtype(argument.type)
    donated = any(x in attributes for x in ("tf.aliasing_output", "jax.buffer_donor"))
    named = name[1] if name else f"argument[{number}]"
    return Input(number, named, shape, dtype, spec, donated)


def _is_array(kind: Any) -> bool:
    """False for a token, which keeps effects such as printing in order."""
    return "token" not in str(kind)


def _shape_and_dtype(kind: Any) -> tuple[tuple[int, ...], str]:
    found = _TYPE.fullmatch(str(kind))
    assert found is not None, kind
    shape = tuple(int(n) for n in found[1].split("x") if n)
    return shape, _DTYPES.get(found[2]) or _dtype(found[2])


def _dtype(text: str) -> str:
    """NumPy's name of a type: `float32` for `f32`, `uint8` for `ui8`."""
    for short, long in {"bf": "bfloat", "ui": "uint", "f": "float", "i": "int"}.items():
        if text.startswith(short):
            name = long + text.removeprefix(short).lower()
            return re.sub(r"^float(\d)e", r"float\1_e", name)
    return text


def _text(attribute: Any) -> str:
    return ir.StringAttr(attribute).value
