"""Where samples come from: text, token files, arrays in memory, and the user's own datasets."""
