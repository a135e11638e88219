"""What stays in a cache of limited size: eviction policies behind one interface, admission, and their replay on traces."""
