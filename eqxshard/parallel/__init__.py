"""Explicit per-device code, for where computation should not just follow the data."""

from . import collectives as collectives
from ._moe import Mixture as Mixture
from ._moe import mixture_of_experts as mixture_of_experts
from ._pipeline import pipeline as pipeline
from ._pipeline_loss import pipeline_loss as pipeline_loss
from ._ring_attention import ring_attention as ring_attention
