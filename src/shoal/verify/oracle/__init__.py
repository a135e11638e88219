"""Oracles: one process that follows a rule in which weights are read late (asynchronous pipelines, parameter servers), differ
between islands, or go by what was sent compressed."""
