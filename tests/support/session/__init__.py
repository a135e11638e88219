"""What a test session does around its tests: times them, orders their files, and looks for processes that they left."""
