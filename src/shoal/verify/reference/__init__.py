"""The reference: one process, plain torch, the same global batches."""
