"""Parameter servers: workers push gradients, servers hold shards of the weights, and a book says what became an update."""
