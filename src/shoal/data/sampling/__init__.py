"""Orders of samples: shuffled, sequential, weighted, a sampler's, and where they are cut into global batches."""
