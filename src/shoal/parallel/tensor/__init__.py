"""Tensor and sequence parallelism: matrices cut over ranks, and the sequence between them."""
