"""``shoal train --find-rate``: learning rates tried on a recipe."""
