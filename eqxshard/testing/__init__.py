"""Checks for your own models in your own CI, on simulated devices.

Simulate eight devices in a `conftest.py`, before anything else touches JAX:
`jax.config.update("jax_num_cpu_devices", 8)`. Each check raises an `AssertionError` that
says what differs, where, and where to look for the cause. May use everything up to
`planning`.
"""

from ..compiled._communication import Collective as Collective
from ._collectives import Collectives as Collectives
from ._collectives import assert_collectives as assert_collectives
from ._collectives import collectives as collectives
from ._donated import assert_donated as assert_donated
from ._invariance import MeshComparison as MeshComparison
from ._invariance import MeshReport as MeshReport
from ._invariance import assert_mesh_invariant as assert_mesh_invariant
from ._lock import assert_plan_lock as assert_plan_lock
from ._lock import assert_sharding_lock as assert_sharding_lock
