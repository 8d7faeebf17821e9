"""Sources of examples, and the loader that makes sharded batches of them.

May use `sharding`; knows nothing of models or steps.
"""

from . import text as text
from ._fashion_mnist import fashion_mnist as fashion_mnist
from ._fashion_mnist import load_fashion_mnist as load_fashion_mnist
from ._hugging_face import HuggingFaceSource as HuggingFaceSource
from ._images import ImageFolder as ImageFolder
from ._loader import Loader as Loader
from ._mixture import Mixture as Mixture
from ._random import RandomTransform as RandomTransform
from ._samplers import Sampler as Sampler
from ._samplers import UniformSampler as UniformSampler
from ._samplers import WeightedSampler as WeightedSampler
from ._sources import ArraySource as ArraySource
from ._sources import Records as Records
from ._sources import RecordSource as RecordSource
from ._sources import Source as Source
from ._stream import from_iterator as from_iterator
from ._synthetic import synthetic_fashion as synthetic_fashion
