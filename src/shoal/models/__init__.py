"""Models that Shoal ships, the user's own beside them, their losses, and dropout that does not depend on the plan."""
