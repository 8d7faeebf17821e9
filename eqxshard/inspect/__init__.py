"""Inspect a run: the decision of a rule for each array, the communication of a step.

May use `sharding`, `transforms` and `training`.
"""
