from ._mesh import batch_sharding as batch_sharding
from ._mesh import describe_mesh as describe_mesh
from ._mesh import name_batch_axes as name_batch_axes
from ._rule import Rule as Rule
