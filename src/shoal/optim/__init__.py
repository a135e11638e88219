"""Optimizers, learning rates and precision: everything between a gradient and a weight."""
