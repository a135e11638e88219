"""Which rows are trained on and which are held out: pure functions on arrays, and the proof that nothing leaks."""
