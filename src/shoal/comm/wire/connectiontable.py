"""Which connections of a listener are one too many: a pure table, told of every event and of the time.

Whoever has not spoken yet may be a stranger without a key. There may be so many of them in all and of one address; the oldest of
the address that has most make room. An address whose connections are closed by the dozen is not listened to for a moment, because
it opens them faster than they are closed.
"""

import collections
from dataclasses import dataclass

Peer = tuple[str, int]
BANNED_SECONDS = 0.5
_MOST_WAITING = 256


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How many connections a listener may have."""

    waiting: int
    """That have not spoken yet, of all addresses."""
    waiting_per_address: int
    total: int
    """Together with those that have."""


def choose_limits(num_descriptors: int, num_used: int) -> Limits:
    """The limits of a listener in a process that may have ``num_descriptors`` and uses ``num_used`` before anybody connects.

    Half of them is for those who have a key. The rest is in reserve: for files, for connections that this process opens, and for
    what is accepted before a limit is applied.
    """
    waiting = max(4, min(_MOST_WAITING, num_descriptors // 16))
    total = max(waiting, num_descriptors // 2 - num_used)
    return Limits(waiting=waiting, waiting_per_address=max(2, waiting // 2), total=total)


class ConnectionTable:
    """The connections of one listener, by their descriptors.

    Args:
        limits: see there.
        trusted_after: seconds after which a silent connection is somebody with a key.
    """

    def __init__(self, limits: Limits, *, trusted_after: float) -> None:
        self.limits = limits
        self._trusted_after = trusted_after
        self._num_connected = 0
        self._waiting: dict[int, tuple[Peer, float]] = {}
        self._by_address: dict[str, dict[int, None]] = {}
        self._closed: collections.Counter[str] = collections.Counter()
        self._counted_since = float("-inf")
        self._banned: dict[str, float] = {}

    def add(self, descriptor: int, peer: Peer | None, now: float) -> list[tuple[int, Peer]]:
        """Somebody connected; who has to go for it. None is one that has gone again already, of which ``remove`` will tell."""
        self._num_connected += 1
        self._forget(descriptor)
        if peer is None:
            return []
        self._waiting[descriptor] = (peer, now)
        self._by_address.setdefault(peer[0], {})[descriptor] = None
        self._trust_old(now)
        limits, own = self.limits, self._by_address.get(peer[0], {})
        if len(own) > limits.waiting_per_address:
            return self._close_oldest(peer[0], now)
        if len(self._waiting) > limits.waiting or self._num_connected > limits.total:
            busiest = max(self._by_address, key=lambda address: len(self._by_address[address]))
            return self._close_oldest(busiest, now)
        return []

    def remove(self, descriptor: int) -> None:
        """A connection has ended."""
        self._num_connected -= 1
        self._forget(descriptor)

    def authenticate(self, descriptor: int) -> None:
        """Somebody said something that only one with a key can say."""
        self._forget(descriptor)

    def close_all(self, now: float) -> list[tuple[int, Peer]]:
        """No descriptor is left: everybody who waits has to go."""
        found = [(descriptor, peer) for descriptor, (peer, _) in self._waiting.items()]
        for descriptor, peer in found:
            self._banned[peer[0]] = now + BANNED_SECONDS
            self._forget(descriptor)
        return found

    def banned(self, now: float) -> tuple[str, ...]:
        """The addresses that are not listened to at this moment."""
        self._banned = {address: until for address, until in self._banned.items() if until > now}
        return tuple(sorted(self._banned))

    @property
    def num_waiting(self) -> int:
        """Connections that have not spoken yet."""
        return len(self._waiting)

    def _close_oldest(self, address: str, now: float) -> list[tuple[int, Peer]]:
        if now - self._counted_since > 1.0:
            self._closed.clear()
            self._counted_since = now
        self._closed[address] += 1
        if self._closed[address] > self.limits.waiting_per_address:
            # All at once: who floods has nobody among them whom a second attempt would not bring back.
            self._banned[address] = now + BANNED_SECONDS
            self._closed[address] = 0
            going = list(self._by_address[address])
        else:
            going = [next(iter(self._by_address[address]))]
        found = [(descriptor, self._waiting[descriptor][0]) for descriptor in going]
        for descriptor in going:
            self._forget(descriptor)
        return found

    def _trust_old(self, now: float) -> None:
        for descriptor, (_, since) in list(self._waiting.items())[:2]:
            if now - since > self._trusted_after:
                self._forget(descriptor)

    def _forget(self, descriptor: int) -> None:
        peer, _ = self._waiting.pop(descriptor, (None, 0.0))
        if peer is not None:
            self._by_address[peer[0]].pop(descriptor)
            if not self._by_address[peer[0]]:
                del self._by_address[peer[0]]
