"""Checkpoints made without torch, and ranks that save together."""
