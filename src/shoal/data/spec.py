"""What is known of the data as values without torch: its shapes, and the file that a run reads while it trains."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

IGNORED = -100
"""A target that counts for nothing, neither in the loss nor in its weight."""
UNKNOWN_LENGTH = 2**62
"""The number of samples of an iterable dataset that does not say it."""


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
    has_one_target: bool = True
    """Targets are one tensor; False where they are several, or among the inputs of a sample that is one dict."""


Change = Literal["same", "touched", "shorter", "replaced"]


@dataclass(frozen=True, kw_only=True)
class WatchedFile:
    """A file as it was at some moment.

    A memory map shows what is written into its file later: the samples would change under a run that has no way to notice.
    """

    path: Path
    num_bytes: int
    needed_bytes: int
    """How long it was when it was opened: so much of it is read."""
    changed_ns: int
    """When it was written last."""
    identity: tuple[int, int]
    """Device and inode: another file of the same name has another one."""

    @classmethod
    def observe(cls, path: Path) -> "WatchedFile":
        """The file as it is now."""
        found = os.stat(path)
        return cls(
            path=path,
            num_bytes=found.st_size,
            needed_bytes=found.st_size,
            changed_ns=found.st_mtime_ns,
            identity=(found.st_dev, found.st_ino),
        )

    def find_change(self) -> Change:
        """What became of it; ``touched`` is written to since, with what only a look inside tells."""
        try:
            now = self.observe(self.path)
        except OSError:
            return "replaced"
        if now.identity != self.identity:
            return "replaced"
        if now.num_bytes < self.needed_bytes:
            return "shorter"
        return "same" if (now.num_bytes, now.changed_ns) == (self.num_bytes, self.changed_ns) else "touched"
