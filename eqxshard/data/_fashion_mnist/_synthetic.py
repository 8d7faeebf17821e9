"""A generated replacement for Fashion-MNIST: ten kinds of garment, drawn by rule.

A garment is a stack of layers: sleeves, then the body over them, then buttons, and so on.
On each line of the image a layer covers one interval, so its shape is two numbers per
line. For garments that hang, lines are rows, and intervals are in the distance from the
garment's axis, which makes the garment symmetric; for shoes, lines are columns.

Numbers are drawn for many images at once. Their arrays have the shape `(n, 1)` with one
number per image, and `(n, 28)` with one per line.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, UInt8

from .._planning import is_planning
from .._sources import ArraySource

_SIDE = 28
_CENTER = (_SIDE - 1) / 2
_LINES = np.arange(_SIDE, dtype=np.float32)
_SIZES = {"train": 60_000, "test": 10_000}
_CHUNK = 500  # images drawn at once, to stay in a core's cache

_PerImage = Float32[np.ndarray, "n 1"]
_PerLine = Float32[np.ndarray, "n 28"]
_Scalar = int | float
_Number = _Scalar | Float32[np.ndarray, "n #28"]
_Range = tuple[_Scalar, _Scalar]


def synthetic_fashion(split: str, *, seed: int = 0, size: int | None = None) -> ArraySource:
    """A generated replacement for [`eqxshard.data.fashion_mnist`][], for tests and demos.

    The same ten classes, shapes and dtypes, drawn by rule: t-shirt, trouser, pullover,
    dress, coat, sandal, shirt, sneaker, bag, ankle boot. Classes overlap (a short-sleeved
    shirt whose buttons do not show is a t-shirt), so no model can classify all images.
    Accuracies on it say nothing about the real dataset.

    **Arguments:**

    - `split`: `"train"` (60,000 examples) or `"test"` (10,000), drawn independently.
    - `seed`: the same seed gives the same images.
    - `size`: another number of examples.

    **Returns:**

    An [`eqxshard.data.ArraySource`][] of `"image"`, uint8 of shape `(n, 28, 28)`, and
    `"label"`, int32 of shape `(n,)`. The classes have equal numbers of examples (give or
    take one if `size` is not a multiple of ten).

    **Raises:**

    `ValueError` if there is no such split, or `size` is not positive.

    !!! Example

        ```python
        source = eqxshard.data.synthetic_fashion("train", seed=1)
        ```
    """
    if split not in _SIZES:
        raise ValueError(f"split={split!r} is not 'train' or 'test'.")
    if size is None:
        size = _SIZES[split]
    if size < 1:
        raise ValueError(f"size={size} must be at least 1.")
    rng = np.random.default_rng([seed, list(_SIZES).index(split)])
    label = rng.permutation(np.arange(size, dtype=np.int32) % len(_GARMENTS))
    image = np.zeros((size, _SIDE, _SIDE), np.uint8)
    # Of a plan, nobody looks at the images.
    garments = {} if is_planning() else _GARMENTS
    for number, draw in enumerate(garments.values()):
        (indices,) = np.nonzero(label == number)
        for first in range(0, len(indices), _CHUNK):
            chunk = indices[first : first + _CHUNK]
            image[chunk] = draw(_Dice(rng, len(chunk)))
    arrays = {"image": image, "label": label}
    return ArraySource(arrays, name="synthetic", unit="images")


class _Dice(NamedTuple):
    """Random numbers, one for each of `n` images."""

    rng: np.random.Generator
    n: int

    def uniform(self, low: _Scalar, high: _Scalar) -> _PerImage:
        return self.rng.uniform(low, high, (self.n, 1)).astype(np.float32)

    def chance(self, probability: _Scalar) -> _PerImage:
        """1 with this probability, else 0."""
        return (self.rng.random((self.n, 1)) < probability).astype(np.float32)


class _Layer(NamedTuple):
    """Covers `start` to `stop` on the lines where `on` is true."""

    on: Bool[np.ndarray, "n 28"]
    start: _Number
    stop: _Number
    tone: _Number  # brightness, relative to the garment's


# In the garments, `v` runs from 0 on the first line to 1 on the last. Distances from the
# axis are not negative, so a layer that starts at -1 covers the middle.


def _top(
    dice: _Dice,
    *,
    length: _Range,
    chest: _Range = (5, 7.5),
    hem: _Range = (5, 8),
    sleeveless: _Scalar = 0,
    short: _Scalar = 0,
    buttons: _Scalar = 0,
    collar: _Scalar = 0,
    rib: _Scalar = 0,
) -> UInt8[np.ndarray, "n 28 28"]:
    """Draw a garment for the upper body.

    `length`, `chest` and `hem` are in pixels, the last two from the axis; `sleeveless`,
    `short` (sleeves), `buttons`, `collar` and `rib` (at the hem) are probabilities.
    """
    long = dice.uniform(*length)
    v = (_LINES - _CENTER - dice.uniform(-1.5, 1.5)) / long + 0.5

    wide = dice.uniform(*chest)
    neck, neck_depth = dice.uniform(1.5, 3.5), dice.uniform(0.06, 0.2)
    waist = wide * dice.uniform(0.85, 1.02)
    body = _curve(
        v, (0, 0.08, 0.3, 0.6, 1), (neck + 1, wide, wide, waist, dice.uniform(*hem))
    )

    elbow = wide + dice.uniform(2.5, 5)
    sleeve = _curve(v, (0, 0.33, 1), (wide - 1, elbow, elbow + dice.uniform(-1, 1)))
    armpit = np.where(v < 0.26, 0, sleeve - dice.uniform(2.3, 4))
    kind = dice.uniform(0, 1)
    sleeve_end = np.where(kind < short, dice.uniform(0.22, 0.5), dice.uniform(0.7, 1))
    sleeve_end *= kind < 1 - sleeveless

    rib_tone = 1 - dice.chance(rib) * dice.uniform(0.05, 0.4)
    button_tone = 1 - dice.chance(buttons) * dice.uniform(0.1, 0.75)
    collar_tone = 1 + dice.chance(collar) * dice.uniform(-0.3, 0.3)
    layers = [
        _Layer(_within(v, 0, sleeve_end), armpit, sleeve, dice.uniform(0.85, 1.05)),
        _Layer(_within(v, 0, 1), -1, body, 1),
        _Layer(_within(v, 0.93, 1), -1, body, rib_tone),
        _Layer(_within(v, neck_depth, 1), -1, dice.uniform(0.1, 0.9), button_tone),
        _Layer(_within(v, 0, 0.13), -1, neck + 1.2, collar_tone),
        _Layer(_within(v, 0, neck_depth), -1, neck * (1 - v / neck_depth), 0),
    ]
    return _paint(dice, layers, _distance_from_axis(dice))


def _trouser(dice: _Dice) -> UInt8[np.ndarray, "n 28 28"]:
    v = (_LINES - _CENTER - dice.uniform(-1, 1)) / dice.uniform(22, 27) + 0.5
    hip = dice.uniform(3.5, 6)
    waist, hem = hip * dice.uniform(0.8, 1), hip * dice.uniform(0.8, 1.35)
    leg = _curve(v, (0, 0.25, 1), (waist, hip, hem))
    crotch = dice.uniform(0.2, 0.45)
    gap = dice.uniform(-0.2, 2.5) * (v - crotch + 0.15)
    layers = [
        _Layer(_within(v, 0, 1), -1, leg, 1),
        _Layer(_within(v, 0, 0.07), -1, leg, dice.uniform(0.7, 1.1)),  # the waistband
        _Layer(_within(v, crotch, 1), -1, gap, dice.uniform(0, 0.5)),
    ]
    return _paint(dice, layers, _distance_from_axis(dice))


def _bag(dice: _Dice) -> UInt8[np.ndarray, "n 28 28"]:
    high, handle = dice.uniform(10, 20), dice.uniform(1, 9)
    first = _CENTER - (high - handle) / 2 + dice.uniform(-1, 1)
    v = (_LINES - first) / high
    wide = dice.uniform(7, 13)
    body = _curve(v, (0, 0.15, 1), (wide * dice.uniform(0.7, 1), wide, wide))
    flap = dice.uniform(0.1, 0.6)

    # The handle is an arch between two ellipses; `u` is the height above the body.
    u = (first - _LINES) / handle
    radius = wide * dice.uniform(0.4, 0.9)
    outer = radius * np.sqrt(np.clip(1 - u**2, 0, 1))
    inner = (radius - dice.uniform(1, 2.2)) * np.sqrt(np.clip(1 - (1.3 * u) ** 2, 0, 1))

    clasp = _within(v, flap - 0.05, flap + 0.05)
    layers = [
        _Layer(_within(u, 0, 1), inner - 0.5, outer, dice.uniform(0.6, 1.1)),
        _Layer(_within(v, 0, 1), -1, body, 1),
        _Layer(_within(v, 0, flap), -1, body - 0.8, dice.uniform(0.75, 1.05)),
        _Layer(clasp, -1, dice.uniform(-1, 3), dice.uniform(0.3, 1.3)),
    ]
    return _paint(dice, layers, _distance_from_axis(dice))


def _shoe(
    dice: _Dice, *, ankle: _Range, heel: _Range, openness: _Range = (0, 0)
) -> UInt8[np.ndarray, "n 28 28"]:
    """Draw a shoe whose toe points left.

    `ankle` and `heel` are heights in pixels; `openness` is from 0, closed, to 1, straps.
    """
    v = (_LINES - _CENTER - dice.uniform(-0.7, 0.7)) / dice.uniform(22, 27) + 0.5
    top, lift, toe = dice.uniform(*ankle), dice.uniform(*heel), dice.uniform(2, 4)
    instep = toe + (top - toe) * dice.uniform(0.3, 0.7)
    floor = _CENTER + (top + lift) / 2 + dice.uniform(0, 2)
    sole = floor - _curve(v, (0.3, 0.75), (0, lift))
    rim = sole - _curve(v, (0, 0.2, 0.5, 0.62, 1), (1, toe, instep, top, top))
    thick, heel_start = dice.uniform(1, 2.5), dice.uniform(0.65, 0.9)

    hole, strap = dice.uniform(*openness), dice.uniform(0.7, 2.2)
    front_hole = _within(v, 0.2 - 0.2 * hole, 0.2 + 0.2 * hole)
    back_hole = _within(v, 0.7 - 0.25 * hole, 0.7 + 0.3 * hole)
    layers = [
        _Layer(_within(v, 0, 1), rim, sole, 1),
        _Layer(front_hole, rim + strap, sole, 0),
        _Layer(back_hole, rim + strap, sole - strap, 0),
        _Layer(_within(v, 0, 1), sole, sole + thick, dice.uniform(0.4, 1.3)),
        _Layer(_within(v, heel_start, 1), sole, floor + thick, dice.uniform(0.4, 1.3)),
    ]
    height = np.broadcast_to(_LINES, (dice.n, _SIDE, _SIDE))
    return _paint(dice, layers, height).transpose(0, 2, 1)


#: The functions that draw the classes, in the order of the labels.
_GARMENTS: dict[str, Callable[[_Dice], UInt8[np.ndarray, "n 28 28"]]] = {
    "t-shirt": partial(_top, length=(19, 24), short=0.95),
    "trouser": _trouser,
    "pullover": partial(_top, length=(19, 25), rib=0.5),
    "dress": partial(
        _top, length=(23, 27), chest=(3.5, 5.5), hem=(4, 10), sleeveless=0.5, short=0.3
    ),
    "coat": partial(_top, length=(21, 27), hem=(5.5, 9), buttons=0.8, collar=0.5),
    "sandal": partial(_shoe, ankle=(5, 12), heel=(0, 8), openness=(0.3, 1)),
    "shirt": partial(_top, length=(19, 25), short=0.35, buttons=0.6, collar=0.6),
    "sneaker": partial(_shoe, ankle=(6, 11), heel=(0, 1)),
    "bag": _bag,
    "ankle boot": partial(_shoe, ankle=(10, 19), heel=(0, 5)),
}


def _within(v: _PerLine, first: _Number, last: _Number) -> Bool[np.ndarray, "n 28"]:
    return (first <= v) & (v < last)


def _curve(
    v: _PerLine, knots: tuple[_Scalar, ...], values: tuple[_Number, ...]
) -> _PerLine:
    """Interpolate linearly between `values` at `knots`; constant outside."""
    curve = np.broadcast_to(np.float32(values[0]), v.shape)
    for left, right, low, high in zip(knots, knots[1:], values, values[1:]):
        curve = curve + (high - low) * np.clip((v - left) / (right - left), 0, 1)
    return curve


def _distance_from_axis(dice: _Dice) -> Float32[np.ndarray, "n 28 28"]:
    """Each pixel's distance from the garment's axis, which is almost vertical."""
    axis = _CENTER + dice.uniform(-1.5, 1.5)
    axis = axis + dice.uniform(-0.12, 0.12) * (_LINES - _CENTER)
    return np.abs(_LINES - axis[:, :, None])


def _paint(
    dice: _Dice, layers: list[_Layer], across: Float32[np.ndarray, "n 28 28"]
) -> UInt8[np.ndarray, "n 28 28"]:
    """Paint layers over one another; `across` is each pixel's position on its line."""
    shape = np.zeros(across.shape, np.float32)
    for on, *numbers in layers:
        start, stop, tone = (np.expand_dims(np.float32(x), -1) for x in numbers)
        # A pixel on the edge is half covered.
        cover = np.clip(np.minimum(across - start, stop - across) + 0.5, 0, 1)
        shape += on[:, :, None] * cover * (tone - shape)
    brightness = dice.uniform(70, 220)[:, :, None]
    grain = dice.uniform(5, 70)[:, :, None] * dice.rng.random(across.shape, np.float32)
    stripes = _stripes(dice)[:, :, None] + _stripes(dice)[:, None, :]
    return np.clip(shape * (brightness + grain + stripes), 0, 255).astype(np.uint8)


def _stripes(dice: _Dice) -> _PerLine:
    """Waves along one direction, from shading to a pattern; faint on most garments."""
    wave = dice.uniform(0.1, 1.8) * _LINES + dice.uniform(0, 2 * np.pi)
    strength = 4 + 60 * dice.uniform(0, 1) ** 6
    return strength * np.sin(wave)
