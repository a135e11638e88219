"""Processes that start, watch, stop and restart ranks, and that say which rank failed and why. No torch in any of it."""
