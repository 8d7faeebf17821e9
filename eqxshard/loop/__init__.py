"""The training loop: `fit`, `evaluate`, their reports, and the ways to stop them.

May use every room below: `training`, `data`, `checkpoint`, and `debug` when a run gives up.
"""
