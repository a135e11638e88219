"""The doctor: what a machine lacks for a run, and what earlier runs left on it."""
