"""Which launcher started this process, and which rank it made of it: pure functions of an environment."""
