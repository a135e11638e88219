"""Verbs and options for clusters: job files, and runs that another launcher starts."""
