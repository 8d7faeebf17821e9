"""How pages and tables write numbers."""

import math


def format_flops(count: int | float) -> str:
    """Floating-point operations, with a unit that fits: `1.5 TFLOP`, `93.6 MFLOP`."""
    for size, unit in ((1e12, "TFLOP"), (1e9, "GFLOP")):
        if count >= 0.1 * size:
            return f"{count / size:,.4g} {unit}"
    return f"{count / 1e6:,.4g} MFLOP"


def format_seconds(seconds: int | float) -> str:
    """Seconds as `1.5 s`, `120 ms`, `3 us` or `70 ns`."""
    if not seconds or not math.isfinite(seconds):
        return "0 s"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 0.1 * size:
            return f"{seconds / size:,.3g} {unit}"
    return f"{1e9 * seconds:.3g} ns"


def format_value(value: int | float) -> str:
    """A metric of a model in four digits, or a whole number: `0.9155`, `12,345`."""
    is_whole = isinstance(value, int) or abs(value) >= 999.95
    return f"{value:,.0f}" if is_whole else f"{value:#.4g}"


def format_number(value: int | float) -> str:
    """Any other number, such as a speed, in three digits: `0.769`, `4,070`."""
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 100 else f"{rounded:.3g}"


def format_count(number: int) -> str:
    """A large number in three digits: `1.25 M`."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if float(f"{number:.3g}") >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number}"
