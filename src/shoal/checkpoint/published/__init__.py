"""Models that a run publishes while it trains: numbered versions, and a pointer to the newest for whoever predicts."""
