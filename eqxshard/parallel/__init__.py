"""Explicit per-device code, for computation that should not simply follow the data.

Ring attention, pipelines and mixtures of experts, for use inside a model. This room may
use `sharding` and `transforms`.
"""

from ._moe import Mixture as Mixture
from ._moe import mixture_of_experts as mixture_of_experts
from ._pipeline import pipeline as pipeline
from ._ring_attention import ring_attention as ring_attention
