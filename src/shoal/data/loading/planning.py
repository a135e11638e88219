"""What a loader reads next, told to the cache of its source: the order is known, so a cache need not guess.

The plan is computed apart from the steps themselves: whatever it gets wrong, because data was appended or a run ends, costs time
and never a sample.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, runtime_checkable

from shoal.core.events import DataCache
from shoal.data.cache.replay import LOOK_AHEAD
from shoal.data.loading.parts import Part, Share
from shoal.data.source import SampleIds, Source

_MOST_STEPS = 4096


@runtime_checkable
class Cached(Protocol):
    """A source that may be read through a cache."""

    def cache_report(self) -> DataCache | None:
        """What the cache has done since the last report; None where there is none."""


@runtime_checkable
class Plans(Cached, Protocol):
    """A source that has use for what is read next."""

    def plan_reads(self, own: Sequence[SampleIds], everyone: Sequence[SampleIds]) -> int:
        """What this rank reads next, batch by batch, and what all ranks do; how many blocks that is, 0 where it is of no use."""


def plan_ahead(source: Source, build: Callable[[Share], Iterator[Part]], share: Share) -> Iterator[Part]:
    """The steps of a share; a source that plans is told of them ahead. ``build`` makes the steps of any share, from the start."""
    parts = build(share)
    if not isinstance(source, Plans) or source.cache_report() is None:
        return parts
    return _told(source, parts, build(share), build(Share()))


def _told(source: Plans, parts: Iterator[Part], own: Iterator[Part], everyone: Iterator[Part]) -> Iterator[Part]:
    blocks_of: list[int] = []
    ahead = 0
    for part in parts:
        if ahead <= LOOK_AHEAD // 2 and len(blocks_of) < _MOST_STEPS // 2:
            while ahead < LOOK_AHEAD and len(blocks_of) < _MOST_STEPS:
                blocks_of.append(source.plan_reads(next(own).microbatches, next(everyone).microbatches))
                ahead += blocks_of[-1]
        ahead -= blocks_of.pop(0)
        yield part
