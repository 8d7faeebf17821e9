"""Callbacks of `fit`: the base class, and callbacks that are ready to use.

This room only names them; their code is in `loop`.
"""

from ..loop._callbacks import Callback as Callback
from ..loop._loop import Loop as Loop
from ..loop._ready_callbacks import EarlyStopping as EarlyStopping
from ..loop._ready_callbacks import EvaluateEMA as EvaluateEMA
from ..loop._ready_callbacks import Every as Every
from ..loop._ready_callbacks import LearningRate as LearningRate
from ..loop._ready_callbacks import Profile as Profile
from ..loop._ready_callbacks import Throughput as Throughput
from ..loop._ready_callbacks import TimeLimit as TimeLimit
