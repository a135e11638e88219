"""Where a run's checkpoints are: a folder that all ranks see, folders of hosts, or an address."""
