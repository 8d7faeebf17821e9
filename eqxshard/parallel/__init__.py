"""Explicit per-device code, for where computation should not just follow the data."""

from . import collectives as collectives
from ._ring_attention import ring_attention as ring_attention
