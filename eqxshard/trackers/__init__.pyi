from ._curves import Curves as Curves
from ._jsonl import JSONLines as JSONLines
from ._metrics import Image as Image
from ._metrics import Tracker as Tracker
from ._mlflow import MLflow as MLflow
from ._progress import ProgressBar as ProgressBar
from ._tensorboard import TensorBoard as TensorBoard
from ._wandb import WandB as WandB
