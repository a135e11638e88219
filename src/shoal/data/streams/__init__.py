"""Iterable datasets that are read in parts."""
