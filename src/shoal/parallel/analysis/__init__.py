"""What a module is made of, found by running it once."""
