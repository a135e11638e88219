"""Every policy on the same access traces: hit rates, and fetches beside the fewest possible.

The optimum is Belady's: the plan is the whole trace. ``planned`` knows what a loader knows, a few thousand accesses ahead, told
in halves of that. ``cachetools`` is played too where it is installed, with the policies that it has.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.data.cache.catalogue import NAMES, build_policy
from shoal.data.cache.planned import Planned
from shoal.data.cache.policy import Key, Plannable, Policy
from shoal.data.cache.traces import Trace, build_block_traces, build_traces

OPTIMUM = "belady"
LOOK_AHEAD = 8192
"""Accesses that are planned ahead, told anew when half of them have happened. With 4096, shuffles inside windows of 2048 rows
were measured to fetch a tenth more than the optimum."""


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What one policy did on one trace, after the cache was filled."""

    policy: str
    trace: str
    accesses: int
    hits: int
    num_keys: int

    @property
    def fetches(self) -> int:
        """Accesses that were no hits."""
        return self.accesses - self.hits

    @property
    def hit_ratio(self) -> float:
        """Share of accesses that were hits."""
        return self.hits / self.accesses


def hits_of(policy: Policy, keys: Sequence[Key], *, look_ahead: int = LOOK_AHEAD) -> Iterator[bool]:
    """For each access of unit size, whether it is a hit; a policy that plans is told what comes next."""
    known = 0
    for at, key in enumerate(keys):
        if isinstance(policy, Plannable) and known < len(keys) and known - at <= look_ahead // 2:
            until = min(len(keys), at + look_ahead)
            policy.plan(keys[known:until])
            known = until
        yield policy.access(key).hit


def replay(name: str, trace: Trace, capacity: int, *, look_ahead: int = LOOK_AHEAD) -> Replayed:
    """One policy on one trace; ``belady`` knows all of it.

    Raises:
        RequestError: there is no such policy.
    """
    keys = trace.keys.tolist()
    if name.startswith("cachetools "):
        hits: Iterator[bool] = _cachetools_hits(name.removeprefix("cachetools "), keys, capacity)
    elif name == OPTIMUM:
        hits = hits_of(Planned(capacity), keys, look_ahead=2 * len(keys))
    else:
        hits = hits_of(build_policy(name, capacity), keys, look_ahead=look_ahead)
    counted = list(hits)[trace.warm :]
    return Replayed(policy=name, trace=trace.name, accesses=len(counted), hits=sum(counted), num_keys=trace.num_keys)


def replay_all(
    *, seed: int = 1, share: float = 0.25, policies: Sequence[str] = (), num_keys: int = 1000
) -> list[list[Replayed]]:
    """All policies on all traces, a row for each policy; the cache holds this share of the keys.

    Args:
        seed: of the traces.
        share: of the keys that the cache holds.
        policies: that are replayed, beside the optimum; all of them where none is named.
        num_keys: of the traces of keys; those of blocks have 400 for 1000.

    Raises:
        RequestError: there is no such policy.
    """
    blocks = build_block_traces(seed, num_blocks=num_keys * 2 // 5, window=max(1, num_keys * 8 // 125))
    traces = [*build_traces(seed, num_keys=num_keys), *blocks]
    names = [*(policies or [*NAMES, *_cachetools_names()]), OPTIMUM]
    return [[replay(name, trace, max(1, int(share * trace.num_keys))) for trace in traces] for name in names]


def fetches_per_block(found: Replayed) -> float:
    """How often each block of a trace of blocks is fetched in an epoch, where an epoch asks for each of its 32 rows once."""
    epochs = found.accesses / (found.num_keys * 32)
    return found.fetches / found.num_keys / epochs


def _cachetools_names() -> list[str]:
    try:
        import cachetools  # noqa: F401
    except ImportError:
        return []
    return ["cachetools LRU", "cachetools LFU", "cachetools FIFO"]


def _cachetools_hits(name: str, keys: Sequence[Key], capacity: int) -> Iterator[bool]:
    import cachetools

    cache: Any = {"LRU": cachetools.LRUCache, "LFU": cachetools.LFUCache, "FIFO": cachetools.FIFOCache}[name](capacity)
    for key in keys:
        if key in cache:
            cache[key]
            yield True
        else:
            cache[key] = None
            yield False
