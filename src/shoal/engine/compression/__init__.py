"""What the engine knows of compressed sums: which settings go with them, and what they keep in a checkpoint."""
