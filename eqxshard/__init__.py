"""Sharding-first training for Equinox.

Plain Equinox PyTrees, placed on a device mesh once, trained by one donated, compiled
step. A mesh and a rule say where arrays live; computation follows the data.
"""

from . import data as data
from . import parallel as parallel
from . import testing as testing
from . import trackers as trackers
from ._batches import DeviceBatches as DeviceBatches
from ._cache import cache_compilations as cache_compilations
from ._ema import ema_model as ema_model
from ._ema import ema_weights as ema_weights
from ._explain import Explanation as Explanation
from ._explain import Leaf as Leaf
from ._explain import explain as explain
from ._gather import scan_layers as scan_layers
from ._shard_map import filter_shard_map as filter_shard_map
from ._weights import load_weights as load_weights
from ._weights import save_weights as save_weights
from .checkpoint import Checkpointer as Checkpointer
from .data import Loader as Loader
from .distributed import initialize as initialize
from .loop import Tracker as Tracker
from .loop import evaluate as evaluate
from .loop import fit as fit
from .mesh import batch_sharding as batch_sharding
from .mesh import make_mesh as make_mesh
from .metrics import Metrics as Metrics
from .precision import Precision as Precision
from .rules import Rule as Rule
from .rules import by_dim as by_dim
from .rules import by_path as by_path
from .rules import combine as combine
from .rules import first_match as first_match
from .rules import fsdp as fsdp
from .rules import offload as offload
from .rules import replicate as replicate
from .rules import zero1 as zero1
from .sharding import constrain as constrain
from .sharding import filter_shard as filter_shard
from .sharding import shardings as shardings
from .state import TrainState as TrainState
from .state import abstract_state as abstract_state
from .state import init_state as init_state
from .step import EvalStep as EvalStep
from .step import TrainStep as TrainStep
from .step import make_eval_step as make_eval_step
from .step import make_train_step as make_train_step
from .transforms import filter_jit as filter_jit

__version__ = "0.1.0"
