"""What a model needs to know about the data, as a protocol.

Rooms on one row do not import each other: ``data`` has the value (``DataSpec``), ``models`` says here what it reads of it.
No torch.
"""

from typing import Protocol


class DataShape(Protocol):
    """The shapes of the data, read-only."""

    @property
    def kind(self) -> str:
        """tokens, classes, regression, pairs or own."""

    @property
    def vocab(self) -> int | None:
        """Number of token ids."""

    @property
    def sequence(self) -> int | None:
        """Tokens of a sample's input."""

    @property
    def features(self) -> tuple[int, ...] | None:
        """Shape of a sample's input where it is not tokens."""

    @property
    def classes(self) -> int | None:
        """Number of classes."""

    @property
    def outputs(self) -> int | None:
        """Numbers that a regression predicts per sample."""
