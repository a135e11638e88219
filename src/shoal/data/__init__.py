"""What a run learns from: sources of samples, their order as a pure function, and the loader that reads ahead."""
