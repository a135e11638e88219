"""The wire in a thread of its own, for a worker whose first thread computes: calls go over, answers come back.

torch lets go of the interpreter while it computes, so signs of life, retries and transfers go on meanwhile.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")
_END_SECONDS = 10.0


class LoopThread:
    """An event loop that runs in a thread until it is closed."""

    def __init__(self, name: str = "wire") -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Begin something over there."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Do something over there, and wait for it."""
        return self.start(work).result()

    def close(self, last: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """End the loop, after one last thing; what is still under way is given up."""
        try:
            if last is not None:
                self.call(last())
        finally:
            self.call(_give_up())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> "LoopThread":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


async def _give_up() -> None:
    """End everything else in this loop: a task that is left in a loop that has stopped is complained about by the interpreter."""
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    if others:
        done, _ = await asyncio.wait(others, timeout=_END_SECONDS)
        # Asked for what they failed of: asyncio says it on the screen of those that nobody asked.
        _ = [task.exception() for task in done if not task.cancelled()]
