"""Explicit per-device code, for computation that should not simply follow the data.

Ring attention, pipelines, mixtures of experts and overlapped matrix products for use
inside a model, and the collectives to write your own. May use `sharding` and `transforms`.
"""

from . import collectives as collectives
from ._matmul import all_gather_matmul as all_gather_matmul
from ._matmul import matmul_reduce_scatter as matmul_reduce_scatter
from ._moe import Mixture as Mixture
from ._moe import mixture_of_experts as mixture_of_experts
from ._pipeline import pipeline as pipeline
from ._pipeline_loss import pipeline_loss as pipeline_loss
from ._ring_attention import ring_attention as ring_attention
