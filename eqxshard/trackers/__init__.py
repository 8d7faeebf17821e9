"""Trackers, which [`eqxshard.fit`][] reports to: the terminal, files, plots, services.

A tracker is any object with the two methods of [`eqxshard.trackers.Tracker`][].
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
