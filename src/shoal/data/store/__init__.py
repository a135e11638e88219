"""Stores of data: immutable blocks of rows with digests, versions that list them, and an index from key to row."""
