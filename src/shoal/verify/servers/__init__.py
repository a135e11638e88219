"""Proofs of runs with parameter servers: recorded roles, the run, and the update rules."""
