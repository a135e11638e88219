"""Runs with parameter servers: the processes of a job, what each of them does, and how they start, stop and are replaced."""
