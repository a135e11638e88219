"""Batches for one replica: which samples each step takes, loaded ahead, by threads and by processes."""
