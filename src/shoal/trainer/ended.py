"""How a run ended, as the command line tells it."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a run ended, for the command line."""

    exit_code: int
    summary: dict[str, Any]
    was_orderly: bool = True
    """False when ranks died: the story was told already, and the summary has little to add."""
