"""Training states and compiled steps: what one update computes, and how it is compiled.

May use `sharding`, `transforms`, `compiled` and `data`; knows nothing of loops, files or
scripts.
"""
