"""The request to stop a run: asked for on one rank, by a signal or by a script, and agreed on by all at the end of a step.

Ranks must stop after the same step. So a request is first only this rank's own (``reason``); it travels with the loss of the next
step (``piggyback.py``), and when any rank has one, all learn of it together (``agreed``).
"""

import signal
from collections.abc import Iterable


class StopRequest:
    """Whether this run is asked to stop, and why."""

    def __init__(self) -> None:
        self.reason: str | None = None
        """Why this rank asks to stop; None while it does not."""
        self.agreed: str | None = None
        """Why all ranks stop, as far as this rank knows; None until they have agreed."""
        self.signal_number = 0
        """Of the signal that asked; 0 while none came."""
        self.is_pending = False
        """A rank of this island asks to stop, and other islands have not heard of it yet."""
        self.is_decided = False
        """Every rank decided alike that training is over, as early stopping does: nobody interrupted it."""

    def listen(self, numbers: Iterable[int]) -> None:
        """Let these signals ask to stop. They may come before there is a model, and are then heard at its first step."""
        for number in numbers:
            signal.signal(number, self._hear)

    def _hear(self, number: int, _frame: object) -> None:
        self.signal_number = number
        self.request(signal.Signals(number).name)

    def request(self, reason: str) -> None:
        """Ask all ranks to stop after the current step; safe to call from a signal handler."""
        self.reason = reason

    def decide(self, reason: str) -> None:
        """End training at once. Every rank calls it at the same step, because all decide from the same reduced values."""
        if self.agreed is None:
            self.agreed, self.is_decided = reason, True

    @property
    def is_requested(self) -> bool:
        """True when this rank asks to stop."""
        return self.reason is not None

    def agree(self, *, any_rank: bool) -> None:
        """Learn whether any rank asked; every rank calls it with the same answer."""
        if any_rank:
            # The request may be another rank's: that there is one was summed, its reason was not.
            self.agreed = self.reason or "signal"
