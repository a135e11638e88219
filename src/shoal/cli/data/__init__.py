"""The verbs of `shoal data`: build, show, verify, cut, describe and measure stores of data."""
