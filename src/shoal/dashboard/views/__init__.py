"""One pure function for each view: a run, or several, to values that are JSON."""
