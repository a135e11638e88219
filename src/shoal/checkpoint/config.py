"""The ``[checkpoint]`` section of a recipe: when checkpoints are written and which are kept."""

from pydantic import Field

from shoal.core.config import Config


class CheckpointConfig(Config):
    """When checkpoints are written and which are kept."""

    every: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0 writes one at the end only."""
    keep: int = Field(default=3, ge=1)
    """How many of the newest checkpoints are kept; the newest from which a step was taken stays besides."""
    keep_every: int | None = Field(default=None, ge=1)
    """Checkpoints at multiples of this step are kept for ever, besides the newest."""
    background: bool = True
    """Write a copy of the state while training goes on; false saves the memory of the copy and stops training for the write."""
    other_data: bool = False
    """Go on from a checkpoint although the data is not what it was trained on; some samples are then repeated, some left out."""
