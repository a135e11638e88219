"""Something to wait for: every ``ring`` wakes all who wait. An ``asyncio.Condition`` without its lock, and with a deadline."""

import asyncio


class Bell:
    """Rung when something has changed; whoever waits looks again."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def ring(self) -> None:
        """Wake everyone who waits now."""
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()

    async def wait(self, seconds: float) -> bool:
        """Wait for the next ring, at most so long; True when it rang."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            # Not wait_for: before Python 3.12 it forgets a cancellation that comes together with the ring.
            async with asyncio.timeout(max(seconds, 0.0)):
                await future
        except TimeoutError:
            return False
        finally:
            self._waiting.discard(future)
        return True
