"""Elections and membership."""
