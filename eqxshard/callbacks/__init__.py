"""What `fit` calls during a run: the base class, and callbacks that are ready to use.

Only names; their code is in `loop`.
"""

from ..loop._callbacks import Callback as Callback
from ..loop._callbacks_log import EvaluateEMA as EvaluateEMA
from ..loop._callbacks_log import LearningRate as LearningRate
from ..loop._callbacks_log import Throughput as Throughput
from ..loop._callbacks_steps import Every as Every
from ..loop._callbacks_steps import Profile as Profile
from ..loop._callbacks_stop import EarlyStopping as EarlyStopping
from ..loop._callbacks_stop import TimeLimit as TimeLimit
from ..loop._loop import Loop as Loop
