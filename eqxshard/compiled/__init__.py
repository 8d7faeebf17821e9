"""The text of compiled programs: parsed, its collectives and their causes, its lint.

May use `sharding`.
"""
