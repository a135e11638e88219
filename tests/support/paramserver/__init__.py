"""Parameter-server runs: as processes, inside one process, as histories, and what they must equal."""
