"""Helpers of the tests of schedules."""
