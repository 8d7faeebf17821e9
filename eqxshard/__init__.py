"""Sharding-first training for Equinox.

Plain Equinox PyTrees, placed on a device mesh once, trained by one donated, compiled
step. A mesh and a rule say where arrays live; computation follows the data.
"""

from . import callbacks as callbacks
from . import data as data
from . import nn as nn
from . import parallel as parallel
from . import run as run
from . import testing as testing
from . import trackers as trackers
from .checkpoint._checkpointer import Checkpointer as Checkpointer
from .checkpoint._weight_matching import WeightsReport as WeightsReport
from .checkpoint._weights import compare_weights as compare_weights
from .checkpoint._weights import load_weights as load_weights
from .checkpoint._weights import save_weights as save_weights
from .compiled._findings import Finding as Finding
from .compiled._findings import LintWarning as LintWarning
from .data import Loader as Loader
from .data._resident import DeviceBatches as DeviceBatches
from .distributed import initialize as initialize
from .inspect._explain import explain as explain
from .inspect._explanation import Explanation as Explanation
from .inspect._explanation import Leaf as Leaf
from .inspect._lint import Findings as Findings
from .inspect._lint import lint as lint
from .loop._evaluate import evaluate as evaluate
from .loop._fit import fit as fit
from .loop._predict import predict as predict
from .loop._protocols import Tracker as Tracker
from .planning._candidates import Candidate as Candidate
from .planning._candidates import Search as Search
from .planning._leaves import PlannedLeaf as PlannedLeaf
from .planning._make_plan import plan as plan
from .planning._plan import Plan as Plan
from .planning._plan import PlannedCollective as PlannedCollective
from .planning._plan import PlannedMemory as PlannedMemory
from .planning._plan import PlannedTime as PlannedTime
from .planning._search import plan_search as plan_search
from .planning._targets import Target as Target
from .planning._timeline import PlannedSpan as PlannedSpan
from .run import RunConfig as RunConfig
from .run import RunResult as RunResult
from .run import cache_compilations as cache_compilations
from .run import cli as cli
from .run import train as train
from .sharding._combinators import combine as combine
from .sharding._combinators import first_match as first_match
from .sharding._combinators import offload as offload
from .sharding._leaf_rules import by_dim as by_dim
from .sharding._leaf_rules import by_path as by_path
from .sharding._leaf_rules import fsdp as fsdp
from .sharding._leaf_rules import replicate as replicate
from .sharding._leaf_rules import zero1 as zero1
from .sharding._mesh import batch_sharding as batch_sharding
from .sharding._mesh import describe_mesh as describe_mesh
from .sharding._mesh import make_mesh as make_mesh
from .sharding._placement import constrain as constrain
from .sharding._placement import filter_shard as filter_shard
from .sharding._placement import shardings as shardings
from .sharding._rule import Rule as Rule
from .training._ema import ema_model as ema_model
from .training._ema import ema_weights as ema_weights
from .training._eval_step import EvalStep as EvalStep
from .training._eval_step import make_eval_step as make_eval_step
from .training._init import abstract_state as abstract_state
from .training._init import init_state as init_state
from .training._metrics import Metrics as Metrics
from .training._precision import Precision as Precision
from .training._scan_layers import scan_layers as scan_layers
from .training._state import TrainState as TrainState
from .training._train_step import TrainStep as TrainStep
from .training._train_step import make_train_step as make_train_step
from .transforms._filter_jit import filter_jit as filter_jit
from .transforms._shard_map import filter_shard_map as filter_shard_map

__version__ = "0.1.0"
