"""Explicit per-device code, for where computation should not just follow the data."""

from . import collectives as collectives
from ._pipeline import pipeline as pipeline
from ._pipeline_loss import pipeline_loss as pipeline_loss
from ._ring_attention import ring_attention as ring_attention
