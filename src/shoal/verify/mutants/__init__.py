"""Planted bugs: what a proof must be able to catch."""
