"""Keyed randomness: every random draw of a forward pass belongs to the model, the step and the sample, not to the plan."""
