"""The comparison of a recorded run with its reference."""
