"""`python -m eqxshard doctor`: what is wrong with a machine, and what mends it.

Imports neither JAX nor what imports it, because it may be JAX that is broken. Facts are
gathered in one module; checks are functions of these facts alone.
"""
