"""Verbs that ask the model of a run something: evaluate it, let it write, let others ask it over HTTP."""
