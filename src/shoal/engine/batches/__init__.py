"""What a step's batch is made of: how many samples it has, and what fills a replica up that has none."""
