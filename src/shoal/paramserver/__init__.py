"""Parameter servers: workers push gradients, servers hold shards of the weights, and an update log says what became an update."""
