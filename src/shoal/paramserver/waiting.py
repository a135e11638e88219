"""Waiting between processes: an event that tells of changes, the timeout of one attempt, and why a request is to go elsewhere."""

import asyncio


class ChangeEvent:
    """Tells of changes. An ``asyncio.Condition`` without its lock, and with a deadline."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """Wake everyone who waits now."""
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()

    async def wait(self, seconds: float) -> bool:
        """Wait for the next change, at most so long; True when there was one."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            # Not wait_for: before Python 3.12 it forgets a cancellation that comes together with the change.
            async with asyncio.timeout(max(seconds, 0.0)):
                await future
        except TimeoutError:
            return False
        finally:
            self._waiting.discard(future)
        return True


# How long one attempt at a request may take before it counts as lost and is sent again.
#
# A death is seen much sooner, by the connection and by the view; a message that was lost is seen by this alone. So it may be
# generous, and it must be: an attempt that is given up begins again at its first byte, and one that is always given up too
# early never ends. It grows with what crosses.

ATTEMPT_SECONDS = 2.0
"""Of a request without a payload."""
SLOWEST_BYTES_PER_SECOND = 2_000_000
"""What one of many who share a slow link gets of it (100 Mbit between six); who gets less cannot take part."""


def seconds_for(num_bytes: int, *, base: float = ATTEMPT_SECONDS) -> float:
    """The deadline of one attempt.

    Args:
        num_bytes: that cross the same link meanwhile, there, onwards or back.
        base: without any.
    """
    return base + num_bytes / SLOWEST_BYTES_PER_SECOND


# Why a server says no to a request that is right in itself: it came to the wrong server, or at the wrong time.


class NotPrimary(Exception):
    """Somebody else decides now: this server's view changed while it was at work, or the one who asks has another view."""


class Moved(Exception):
    """The one that was asked is not the one to ask any more: a new view came before its answer."""
