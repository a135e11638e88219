"""Which plan to use: memory and time of a step predicted from a chain of layers and a cluster, searched, explained."""
