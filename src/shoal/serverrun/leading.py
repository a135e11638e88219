"""A worker that is a group of ranks: the first takes portions, pulls and pushes; the others compute with it what it says.

To the servers, the book and the center the first rank is the worker, and it works by the same code as one that is alone: where
that computes a portion by itself, here a command goes to the group first, then the weights (``dealing.py``). So every update rule
works with groups. While there is nothing to do the leader says so from time to time: a rank that hears nothing for the deadline
names it and ends.
"""

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from shoal.comm.channel import Channel
from shoal.core.errors import RunError
from shoal.serverrun.dealing import LEADER, Dealing
from shoal.serverrun.portion import ShareResult, ShareRunner

_RUN, _STRETCH, _WAIT, _END = range(4)
_COMMAND_NUMBERS = 5
"""What is to be done, and up to four numbers that say which."""
_SIGNS_PER_DEADLINE = 4

T = TypeVar("T")


class Leader:
    """See the module; a ``Shares`` of the whole group.

    Args:
        shares: this rank's passes.
        dealing: weights and gradients.
        channel: all ranks of the group.
        deadline_seconds: how long the others wait for a command.
    """

    def __init__(self, shares: ShareRunner, dealing: Dealing, channel: Channel, *, deadline_seconds: float) -> None:
        self._shares = shares
        self._dealing = dealing
        self._channel = channel
        # A command and what follows it are one thing to the group; a sign of life must not come in between.
        self._lock = threading.Lock()
        self._lost: Exception | None = None
        self._is_over = threading.Event()
        self._signs = threading.Thread(
            target=self._give_signs, args=(deadline_seconds / _SIGNS_PER_DEADLINE,), name="signs", daemon=True
        )
        self._signs.start()

    @property
    def num_samples(self) -> int:
        """Of the training split."""
        return self._shares.num_samples

    def run(self, step: int, share: int, *, part: int = 0, num_parts: int = 1) -> ShareResult:
        """See ``Shares``; the gradient is in the row."""
        return self._do(
            lambda: self._shares.run(step, share, part=part, num_parts=num_parts), _RUN, step, share, part, num_parts
        )

    def run_stretch(self, step: int, start: int, stop: int) -> float:
        """See ``Shares``; the gradient is in the row."""
        return self._do(lambda: self._shares.run_stretch(step, start, stop), _STRETCH, step, start, stop)

    def end(self) -> None:
        """Let the others go home."""
        self._is_over.set()
        with self._lock:
            self._tell(_END)

    def _do(self, compute: Callable[[], T], *command: int) -> T:
        with self._lock:
            self._tell(*command)
            self._dealing.deal()
            found = compute()
            self._dealing.collect()
            return found

    def _tell(self, *command: int) -> None:
        if self._lost is not None:
            raise self._lost
        _broadcast(self._channel, command)

    def _give_signs(self, every_seconds: float) -> None:
        while not self._is_over.wait(every_seconds):
            with self._lock:
                try:
                    if not self._is_over.is_set():
                        self._tell(_WAIT)
                except (RunError, RuntimeError) as error:
                    # Whoever works meets it at the next command. gloo raises plain RuntimeErrors.
                    self._lost = error
                    return


def follow(shares: ShareRunner, dealing: Dealing, channel: Channel) -> None:
    """The life of every other rank of a group: does what the leader says, until that says that it is over.

    Raises:
        PeerLost: a rank of the group died, or was silent for the deadline.
    """
    while True:
        what, *numbers = _broadcast(channel, ())
        if what == _END:
            return
        if what == _WAIT:
            continue
        dealing.deal()
        step, first, second, third = numbers
        if what == _RUN:
            shares.run(step, first, part=second, num_parts=third)
        else:
            assert what == _STRETCH, f"{what} is no command"
            shares.run_stretch(step, first, second)
        dealing.collect()


def _broadcast(channel: Channel, command: tuple[int, ...]) -> list[int]:
    told = torch.zeros(_COMMAND_NUMBERS, dtype=torch.int64)
    for place, number in enumerate(command):
        told[place] = number
    return [int(number) for number in channel.broadcast_(told, LEADER)]
