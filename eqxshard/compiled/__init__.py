"""The text of compiled programs: a parser, collectives and their causes, and lint.

This room may use `sharding` and `distributed`.
"""
