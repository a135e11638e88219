"""The ``[checkpoint]`` section of a recipe: when checkpoints are written and which are kept."""

from pydantic import Field, field_validator

from shoal.core.config import Config
from shoal.core.errors import did_you_mean

PLACES = ("auto", "shared", "first", "hosts")


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
    place: str = "auto"
    """Where checkpoints go: ``shared``, a run directory that all ranks see; ``first``, gathered to rank 0's host; ``hosts``, each
    host keeps its part; or an address of fsspec such as ``s3://bucket/run``. ``auto``: shared where it is, else first."""

    @field_validator("place")
    @classmethod
    def _is_a_place(cls, place: str) -> str:
        if place not in PLACES and "://" not in place:
            raise ValueError(
                f"{place!r} is no place, and no address such as s3://bucket/run; {did_you_mean(place, PLACES)}"
            )
        return place

    @property
    def address(self) -> str | None:
        """Where checkpoints go, when that is no folder of a host."""
        return self.place if "://" in self.place else None
