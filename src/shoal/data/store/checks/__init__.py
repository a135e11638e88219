"""Whether a store is what was written, what was left in it, and how fast it is read."""
