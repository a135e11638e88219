"""L-BFGS over shards: the algorithm, its line search, and the coordinator that drives it."""
