"""PyTrees as JSON: arrays by path, code by import path, everything else by value."""

import dataclasses
import functools as ft
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import PyTree

from ..sharding._leaves import is_array
from ._references import is_referable, refer, resolve

_PLAIN = (bool, int, float, str, type(None))


class Encoder:
    """Turns a PyTree into JSON values.

    **Arguments:**

    - `paths`: the path of each array of the PyTree, by `id`.
    """

    def __init__(self, paths: Mapping[int, str]):
        self._paths = paths

    def encode(self, node: Any, where: str) -> Any:
        """The JSON value of a node; `TypeError` names what cannot be written."""
        if isinstance(node, _PLAIN):
            return node
        if is_array(node) and id(node) in self._paths:
            return {"array": self._paths[id(node)]}
        # In a static field, such as a size that NumPy computed.
        if isinstance(node, np.generic) and isinstance(node.item(), _PLAIN):
            return {"scalar": [node.dtype.name, node.item()]}
        if isinstance(node, Mesh):
            return {"mesh": list(node.axis_names)}
        if isinstance(node, PartitionSpec):
            return {"spec": [list(e) if isinstance(e, tuple) else e for e in node]}
        if isinstance(node, np.dtype):
            return {"dtype": node.name}
        if isinstance(node, ft.partial):
            parts = {"fn": node.func, "args": node.args, "kwargs": node.keywords}
            return {"partial": self._children(parts, where)}
        if isinstance(node, list) or type(node) is tuple:
            items = [self.encode(x, f"{where}.{i}") for i, x in enumerate(node)]
            return items if isinstance(node, list) else {"tuple": items}
        if isinstance(node, dict):
            return {"dict": [[k, self.encode(x, f"{where}.{k}")] for k, x in node.items()]}
        if isinstance(node, tuple) and hasattr(node, "_fields"):
            names = getattr(node, "_fields")  # noqa: B009
            return self._object(node, dict(zip(names, node)), where)
        if dataclasses.is_dataclass(node) and not isinstance(node, type):
            return self._object(node, self._dataclass_fields(node), where)
        if is_referable(node):
            return {"code": refer(node, where)}
        raise TypeError(
            f"{where} is a {type(node).__name__}, which a crash dump cannot hold; make it "
            "a field of plain values, arrays, dataclasses or importable functions."
        )

    def _children(self, parts: Mapping[str, Any], where: str) -> dict[str, Any]:
        return {name: self.encode(part, f"{where}.{name}") for name, part in parts.items()}

    def _object(self, node: Any, fields: Mapping[str, Any], where: str) -> dict[str, Any]:
        cls = type(node)
        encoded = {}
        for name, value in fields.items():
            if _is_default(cls, name, value):
                # Equinox's own layers have lambdas as defaults.
                encoded[name] = {"default": name}
            else:
                encoded[name] = self.encode(value, f"{where}.{name}")
        return {"object": refer(cls, where), "fields": encoded}

    def _dataclass_fields(self, node: Any) -> dict[str, Any]:
        names = [field.name for field in dataclasses.fields(node)]
        return {name: getattr(node, name) for name in names if hasattr(node, name)}


class Decoder:
    """The reverse of `Encoder`.

    **Arguments:**

    - `arrays`: the arrays, by path.
    - `script`: the path of the script that was `__main__`.
    - `untrusted`: a folder from which nothing is imported.
    """

    def __init__(
        self,
        arrays: Mapping[str, Any],
        script: str | None,
        untrusted: Path | None = None,
    ):
        self._arrays = arrays
        self._resolve = ft.partial(resolve, script=script, untrusted=untrusted)

    def decode(self, value: Any) -> PyTree:
        """The PyTree of a JSON value; `ValueError` if it names code that it may not."""
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, list):
            return [*map(self.decode, value)]
        ((kind, content), *_) = value.items()
        if kind == "array":
            return self._arrays[content]
        if kind == "mesh":
            # A step is replayed on one device.
            devices = np.array(jax.devices()[:1]).reshape([1] * len(content))
            return Mesh(devices, content)
        if kind == "spec":
            return PartitionSpec(*(tuple(e) if isinstance(e, list) else e for e in content))
        if kind == "dtype":
            return np.dtype(content)
        if kind == "scalar":
            return np.dtype(content[0]).type(content[1])
        if kind == "partial":
            parts = {name: self.decode(part) for name, part in content.items()}
            return ft.partial(parts["fn"], *parts["args"], **parts["kwargs"])
        if kind == "tuple":
            return tuple(map(self.decode, content))
        if kind == "dict":
            return {key: self.decode(part) for key, part in content}
        if kind == "code":
            return self._resolve(content)
        return self._object(content, value["fields"])

    def _object(self, reference: str, encoded: Mapping[str, Any]) -> Any:
        cls = self._resolve(reference)
        is_tuple = isinstance(cls, type) and issubclass(cls, tuple)
        if not is_tuple and not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
            raise ValueError(f"{reference} is not a module or dataclass any more.")
        fields = {
            name: _defaults(cls)[part["default"]]
            if isinstance(part, dict) and "default" in part
            else self.decode(part)
            for name, part in encoded.items()
        }
        if is_tuple:
            return cls(**fields)
        # As unflattening does: without running `__init__`.
        node = object.__new__(cls)
        for name, field in fields.items():
            object.__setattr__(node, name, field)
        return node


def _defaults(cls: type) -> dict[str, Any]:
    """The defaults of the parameters of a class's `__init__`."""
    parameters = inspect.signature(cls.__init__).parameters
    return {name: parameter.default for name, parameter in parameters.items()}


def _is_default(cls: type, name: str, value: Any) -> bool:
    if not issubclass(cls, eqx.Module) or not callable(value):
        return False
    return _defaults(cls).get(name, _MISSING) is value


_MISSING = object()
