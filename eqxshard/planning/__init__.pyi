from ._efficiency import Efficiency as Efficiency
from ._plan import Plan as Plan
from ._plan import PlannedMemory as PlannedMemory
from ._plan import PlannedTime as PlannedTime
from ._targets import Target as Target
from ._timeline import PlannedSpan as PlannedSpan
