"""Runs for tests of the dashboard: recorded ones, large ones that were made up, and clients of its server."""
