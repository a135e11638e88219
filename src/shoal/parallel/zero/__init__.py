"""ZeRO: optimizer state, gradients and weights shared out along dp."""
