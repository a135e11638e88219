"""A parameter-server job seen from the process that starts it: start, watch, restart, finish."""
