"""Sources of examples, and the loader that makes sharded batches of them.

May use `sharding`; knows nothing of models or steps.
"""

from . import text as text
from ._adapters import HuggingFaceSource as HuggingFaceSource
from ._adapters import TorchSource as TorchSource
from ._fashion_mnist._choose import load_fashion_mnist as load_fashion_mnist
from ._fashion_mnist._load import fashion_mnist as fashion_mnist
from ._fashion_mnist._synthetic import synthetic_fashion as synthetic_fashion
from ._images import ImageFolder as ImageFolder
from ._loader import Loader as Loader
from ._mixture import Mixture as Mixture
from ._random import ExampleRandom as ExampleRandom
from ._random import RandomTransform as RandomTransform
from ._samplers import ClassBalancedSampler as ClassBalancedSampler
from ._samplers import Sampler as Sampler
from ._samplers import UniformSampler as UniformSampler
from ._samplers import WeightedSampler as WeightedSampler
from ._sources import ArraySource as ArraySource
from ._sources import Records as Records
from ._sources import RecordSource as RecordSource
from ._sources import Source as Source
from ._stream import from_iterator as from_iterator
