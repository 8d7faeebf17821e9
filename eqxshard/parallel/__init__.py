"""Explicit per-device code, for where computation should not just follow the data."""

from . import collectives as collectives
