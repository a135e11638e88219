"""Processes and how they reach each other: what ties a process's life to its parent's, process groups, collectives."""
