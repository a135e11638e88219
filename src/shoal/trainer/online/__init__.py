"""A run that never ends: it publishes its model while it trains, holds refreshes to a bound, and measures how its data drifts."""
