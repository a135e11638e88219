"""Pipelines: a module cut into stages, and the runtime that executes a Schedule over them."""
