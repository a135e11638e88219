"""Models that Shoal ships, the user's own beside them, and their losses."""
