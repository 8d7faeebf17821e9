"""The first value of a step that is not finite: its operation and the line of its code.

May use `sharding`, `transforms`, `compiled` and `training`.
"""

from ._first_nonfinite import FirstNonfinite as FirstNonfinite
