"""What has arrived, as a value, and what whoever watches for it must be able to do."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from shoal.data.table import Schema, Table


@dataclass(frozen=True, kw_only=True)
class Arrived:
    """Rows that are not in the store yet."""

    tables: Iterable[Table]
    schema: Schema
    offsets: Mapping[str, Any]
    """How far the source is taken in with them; committed together with the rows."""
    after: Mapping[str, Any]
    """How far it must have been taken in before: none where this is the first of it."""
    what: str
    """For people."""


class Arrivals(Protocol):
    """A source that grows."""

    def look(self, taken: Mapping[str, Any], schema: Schema | None, seconds: float) -> Arrived | None:
        """What has arrived beyond what is taken in; None where nothing has for so long.

        Args:
            taken: how far sources are taken in, as the newest version of the store says.
            schema: of the store; None while there is none.
            seconds: to wait for something to arrive.

        Raises:
            RequestError: a row does not fit, or what was to be read is gone; names it.
            RunError: the source does not answer.
        """

    def close(self) -> None:
        """Leave the source."""
