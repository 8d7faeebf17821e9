"""Sources of examples, and the loader that makes sharded batches of them."""

from ._fashion_mnist import fashion_mnist as fashion_mnist
from ._loader import Loader as Loader
from ._sources import ArraySource as ArraySource
from ._sources import Records as Records
from ._sources import RecordSource as RecordSource
from ._sources import Source as Source
from ._synthetic import synthetic_fashion as synthetic_fashion
