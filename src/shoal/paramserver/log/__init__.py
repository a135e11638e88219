"""The log of a run with parameter servers: updates, the commands that made them, and the log leader."""
