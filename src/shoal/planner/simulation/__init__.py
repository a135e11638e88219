"""What ``simulate.py`` is made of: prices of cells, ranks that are unlike, long horizons, and what is shown of a step."""
