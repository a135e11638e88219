"""Modules cut into stages, on ranks and under the trainer."""
