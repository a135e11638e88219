"""What a model needs to know about the data. A value without torch: the command line prints it before anything starts."""

from dataclasses import dataclass

IGNORED = -100
"""A target that counts for nothing, neither in the loss nor in its weight."""


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """The shapes of the data; a number that makes no sense for its kind is None."""

    kind: str
    """tokens, classes, regression, pairs (of a source and a target sequence) or own."""
    vocab: int | None = None
    """Number of token ids."""
    sequence: int | None = None
    """Tokens of a sample's input."""
    features: tuple[int, ...] | None = None
    """Shape of a sample's input where it is not tokens."""
    classes: int | None = None
    """Number of classes."""
    outputs: int | None = None
    """Numbers that a regression predicts per sample."""
    baseline_loss: float | None = None
    """Bigram entropy of the training split in nats per token, where it is text; a model that learned anything is below it."""
    tokens_per_sample: int = 1
    """Tokens that one sample trains on; 1 where a sample is not a sequence."""
