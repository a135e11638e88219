"""From samples of the user's own to one batch: stacked, padded or packed."""
