"""Counts the functions of eqxshard that a call goes through; a test limits the number."""

import gc
import os
import sys
from collections.abc import Callable
from typing import Any

import eqxshard

PACKAGE = os.path.dirname(eqxshard.__file__)


def frames_of(function: Callable[[], Any]) -> tuple[int, int]:
    """How many functions of ours a call enters, and how deep they are nested."""
    entered, depth, deepest = 0, 0, 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal entered, depth, deepest
        if event in ("call", "return") and frame.f_code.co_filename.startswith(PACKAGE):
            depth += 1 if event == "call" else -1
            entered += event == "call"
            deepest = max(deepest, depth)

    # A garbage collection may close abandoned iterators of ours, which would count.
    gc.disable()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return entered, deepest
