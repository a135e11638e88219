"""A step simulated on a whole cluster: slow ranks, failures over a long run, and what is shown of it."""
