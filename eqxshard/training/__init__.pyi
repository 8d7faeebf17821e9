from ._eval_step import EvalStep as EvalStep
from ._examples import Metrics as Metrics
from ._train_step import TrainStep as TrainStep
