"""beartype for jaxtyping's import hook, with the checks of nested functions made once.

The hook decorates a nested function whenever the function around it is called. Compiling
its checks each time took a tenth of the time of all tests.
"""

from collections.abc import Callable, Hashable

from beartype import beartype

_CHECKS: dict[Hashable, Callable] = {}


def check_types(function: Callable) -> Callable:
    """Decorate a function with the signature that is to be checked, and no body."""
    if function.__defaults__ or function.__kwdefaults__:
        # The cache would keep the default values alive.
        return beartype(function)
    annotations = function.__annotations__.items()
    key = (function.__module__, function.__qualname__, function.__code__, *annotations)
    try:
        if key not in _CHECKS:
            _CHECKS[key] = beartype(function)
    except TypeError:  # An annotation that cannot be hashed.
        return beartype(function)
    return _CHECKS[key]
