"""Hooks that act, shipped for recipes and for the library: early stopping, the best checkpoint, averaged weights, rate finder."""
