"""Weights and models for other programs."""
