"""Rewrites of the program that a user wrote: the same values, faster or safer."""
