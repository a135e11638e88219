"""Which way leads to the other hosts, and whether it does."""
