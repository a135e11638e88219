"""The process of a server: its shards, its part of every checkpoint, and how a run is finalized."""
