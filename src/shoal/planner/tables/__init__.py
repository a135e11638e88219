"""Predictions for a table of measured runs: reading the table, predicting each row, scoring the predictions."""
