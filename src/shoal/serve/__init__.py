"""Predictions over HTTP with the newest model that a run has published: a small server, and never a torn model."""
