"""What is planned, on its way to the process that compiles it.

It is pickled by cloudpickle, because optimizers are closures and functions are often
lambdas. But cloudpickle sends what a script defines by value, and the classes of Equinox's
modules do not survive that: the functions and classes of the script are sent by name, and
the other process imports the script.
"""

import dataclasses
import io
import pickle
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle
import equinox as eqx
import jax
import optax
from jaxtyping import PyTree

from ..debug._script import import_script, script_path
from ..sharding._rule import Rule
from ..training._precision import Precision
from ._targets import Compiler, Target

#: Settings of JAX that change what is compiled.
_CONFIG = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
)


@dataclasses.dataclass(frozen=True)
class Request:
    """The arguments of [`eqxshard.plan`][], checked.

    - `batch`: a `jax.ShapeDtypeStruct` for each array.
    - `devices`: their number.
    - `backend`: the compiler.
    - `options`: of `make_train_step`, other than those that `init_state` takes, too.
    - `limit`: the most bytes that a device may need: a step whose state alone needs more
        is not compiled.
    """

    make_model: Callable[[Any], PyTree]
    loss_fn: Callable[..., Any]
    optim: optax.GradientTransformation
    batch: PyTree
    mesh_shape: Mapping[str, int]
    devices: int
    rule: Rule
    target: Target
    backend: Compiler
    trainable: PyTree
    precision: Precision | None
    options: Mapping[str, Any]
    limit: float | None = None


def dump_request(request: Request) -> bytes:
    """Pickle a request.

    **Raises:**

    `TypeError` if a part of it cannot be pickled.
    """
    config = {name: getattr(jax.config, name) for name in _CONFIG}
    if request.backend == "cpu":
        config["jax_num_cpu_devices"] = request.devices
    out = io.BytesIO()
    pickle.dump(config, out)
    try:
        _Pickler(out).dump(request)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            "plan compiles in another process, to which something cannot be sent "
            f"({error}); define the model, the loss function and the optimizer at the top "
            "level of a script or module."
        ) from error
    return out.getvalue()


def load_request(data: bytes) -> Request:
    """Set JAX up as it was where a request was pickled, and unpickle it."""
    file = io.BytesIO(data)
    # Before anything that may make an array.
    for name, value in pickle.load(file).items():
        jax.config.update(name, value)
    return pickle.load(file)


class _Pickler(cloudpickle.Pickler):
    """Sends what is at the top level of the script that runs by name."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.CodeType):
            # cloudpickle 3.1.3 leaves out the file, which errors and findings name.
            reduced: Any = self.dispatch_table[types.CodeType](obj)
            return _make_code, (*reduced, obj.co_filename)
        is_code = isinstance(obj, type | types.FunctionType)
        if is_code and getattr(obj, "__module__", None) == "__main__":
            script, name = script_path(), obj.__qualname__
            if script is not None and _lookup(sys.modules["__main__"], name) is obj:
                return _from_script, (script, name)
            if isinstance(obj, type) and issubclass(obj, eqx.Module):
                raise TypeError(f"class {obj.__name__} is in no file's top level")
        return super().reducer_override(obj)


def _from_script(script: str, name: str) -> Any:
    return _lookup(import_script(script), name)


def _lookup(module: Any, name: str) -> Any:
    found = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _make_code(
    make: Callable[..., types.CodeType], arguments: tuple[Any, ...], file: str
) -> types.CodeType:
    return make(*arguments).replace(co_filename=file)
