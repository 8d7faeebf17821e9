"""Trackers, which [`eqxshard.fit`][] reports to: the terminal, files, plots.

A tracker is any object with the two methods of [`eqxshard.Tracker`][]. Uses no other part
of the package.
"""

from ._curves import Curves as Curves
from ._jsonl import JSONLines as JSONLines
from ._progress import ProgressBar as ProgressBar
from ._tensorboard import TensorBoard as TensorBoard
