"""Islands in a step: their part in the engine, and how it is built."""
