"""Runs inside the test's own process."""
