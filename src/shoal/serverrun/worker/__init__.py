"""The process of a worker: one rank or a group of ranks that computes gradients for the servers."""
