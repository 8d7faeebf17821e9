"""Everything around training in a script: options, devices, a run folder, and `train`.

The pieces can be used one by one. May use every other room; nothing uses this one.
"""

from ._cli import cli as cli
from ._config import RunConfig as RunConfig
from ._config import default as default
from ._devices import find_devices as find_devices
from ._devices import mesh_from_text as mesh_from_text
from ._devices import parse_mesh as parse_mesh
from ._devices import simulate_devices as simulate_devices
from ._restore_model import restore_model as restore_model
from ._run_folder import RunFolder as RunFolder
from ._train import RunResult as RunResult
from ._train import train as train
