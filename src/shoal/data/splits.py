"""The three splits of the data and what a model needs to know about them."""

from dataclasses import dataclass

from shoal.data.source import Source
from shoal.data.spec import DataSpec
from shoal.data.watchedfile import WatchedFile


@dataclass(frozen=True, kw_only=True)
class Splits:
    """Train, validation and test; a split whose share is 0 has no sample."""

    train: Source
    validation: Source
    test: Source
    spec: DataSpec
    file: WatchedFile | None = None
    """Where samples are read from a file while a run trains: that file, as it was when it was opened."""
