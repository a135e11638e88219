"""What a planted bug is, as a value: its plan, what the recipe needs for it, and the comparison that must see it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from shoal.optim.config import PrecisionName
from shoal.verify.mutants.planted_bugs import PlantedBug


class Death(NamedTuple):
    """A server that is killed, in a proof and in its control."""

    name: str
    """Of the process, such as ``server-0``."""
    after: int
    """The round that it has just applied, counted from 0."""


@dataclass(frozen=True)
class Mutant:
    """One bug."""

    name: str
    plan: str
    by: str
    """The comparison that is the first to see it; where it may be one of several, ``loss or grad``."""
    bug: PlantedBug
    precision: PrecisionName = "float32"
    overrides: tuple[str, ...] = ()
    """What the recipe must have, as ``section.key=value``."""
    model: Mapping[str, Any] | None = None
    """A model of its own, where the bug shows in no other."""
    data: Mapping[str, Any] | None = None
    reported: str = ""
    """Where users met it."""
    deaths: tuple[Death, ...] = ()
    """Who dies in the run."""
