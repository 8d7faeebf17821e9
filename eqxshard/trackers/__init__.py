"""Where [`eqxshard.fit`][] reports to: the terminal, a file of numbers, a picture.

A tracker is anything with the two methods of [`eqxshard.Tracker`][]; these are the ones
that come along.
"""

from ._curves import Curves as Curves
from ._jsonl import JSONLines as JSONLines
from ._progress import ProgressBar as ProgressBar
