"""States and weights on disk: written safely, checked, and read onto any mesh.

May use `sharding`, `transforms` and `training`.
"""
