"""Inspect a run: the decision of a rule for each array.

May use `sharding`, `transforms` and `training`.
"""
