"""Sources of examples, and the loader that makes sharded batches of them.

May use `sharding`; knows nothing of models or steps.
"""

from . import text as text
from ._buckets import Buckets as Buckets
from ._fashion_mnist import fashion_mnist as fashion_mnist
from ._fashion_mnist import load_fashion_mnist as load_fashion_mnist
from ._fashion_mnist import synthetic_fashion as synthetic_fashion
from ._host import RandomTransform as RandomTransform
from ._loader import Loader as Loader
from ._records import RecordSource as RecordSource
from ._samplers import Sampler as Sampler
from ._samplers import UniformSampler as UniformSampler
from ._samplers import WeightedSampler as WeightedSampler
from ._sources import ArraySource as ArraySource
from ._sources import Mixture as Mixture
from ._sources import Source as Source
from ._stream import from_iterator as from_iterator
