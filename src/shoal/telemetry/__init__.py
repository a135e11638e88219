"""What a run shows of itself: the shared board, events, progress, memory, traces. None of it can stop training."""
