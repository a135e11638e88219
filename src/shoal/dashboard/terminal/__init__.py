"""Runs in a terminal: a picture that is drawn again every second, lists, and the report card."""
