"""Sharding-first training for Equinox."""

__version__ = "0.1.0"
