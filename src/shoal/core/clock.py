"""Time and deadlines. Every wait in Shoal takes a ``Deadline``, so that no wait is for ever and each can say how long it was."""

import time
from dataclasses import dataclass, field

from shoal.core.errors import RunError


@dataclass(frozen=True, kw_only=True)
class Deadline:
    """A moment on the monotonic clock, and the seconds it was set for."""

    seconds: float
    started: float = field(default_factory=time.monotonic)

    @property
    def remaining(self) -> float:
        """Seconds left, never below zero."""
        return max(0.0, self.started + self.seconds - time.monotonic())

    @property
    def is_over(self) -> bool:
        """True when nothing is left."""
        return self.remaining == 0.0

    def check(self, waiting_for: str) -> None:
        """Raise when the deadline has passed.

        Raises:
            RunError: names what was waited for and for how long.
        """
        if self.is_over:
            raise RunError(f"waited {self.seconds:g} s for {waiting_for}")
