"""An exchange between islands that goes on beside the next steps, on a thread and a channel of its own.

The thread works on tensors that nobody else touches until the exchange was waited for. Its channel is not the one that steps use:
two threads of one rank that shared a transport would answer each other's messages. Nothing is started from a callback: the
step that sends a fragment starts its exchange, the step that applies it waits for it, and both are the same on all ranks.
"""

import threading
from collections.abc import Callable, Iterator

import torch

from shoal.comm.channel import Channel, PeerLost
from shoal.comm.trafficcounter import TrafficCounts
from shoal.core.errors import RunError


class Flight:
    """One exchange that is under way.

    Args:
        exchange: goes through the messages, one after the other; it runs on the thread.
        channel: what the messages go through, used by nobody else meanwhile.
        what: it is, for errors: such as "fragment 1 of round 4".
        rank: of this process, for errors.
        deadline_seconds: that a message may take.
    """

    def __init__(
        self,
        exchange: Callable[[], Iterator[None]],
        channel: Channel,
        *,
        what: str,
        rank: int,
        deadline_seconds: float,
    ) -> None:
        self._exchange, self._channel = exchange, channel
        self._what, self._rank, self._deadline = what, rank, deadline_seconds
        self._messages = 0
        self._error: BaseException | None = None
        self._arrived = threading.Event()
        self.counts: TrafficCounts = {}
        """What crossed; complete when it has arrived."""
        self._thread = threading.Thread(target=self._run, name="island-exchange", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with torch.no_grad(), self._channel.traffic.counting() as self.counts:
                for _ in self._exchange():
                    self._messages += 1
        except BaseException as error:  # Here the thread ends; whoever waits raises it.
            self._error = error
        finally:
            self._arrived.set()

    @property
    def has_arrived(self) -> bool:
        """The exchange has ended, well or not."""
        return self._arrived.is_set()

    def check(self) -> None:
        """Look without waiting.

        Raises:
            RunError: the exchange has failed.
        """
        if self.has_arrived:
            self._raise_failure()

    def wait(self) -> None:
        """Wait until all has arrived.

        Raises:
            RunError: it has failed, or no message came through within the deadline; names the rank and the round.
        """
        seen = -1
        while not self._arrived.wait(self._deadline):
            if self._messages == seen:
                raise RunError(
                    f"rank {self._rank} waited {self._deadline:g} s for {self._what} of the other islands, of which "
                    f"{seen} messages have come; look at the output of the ranks of the other islands"
                )
            seen = self._messages
        self._raise_failure()
        self._thread.join()

    def _raise_failure(self) -> None:
        if isinstance(self._error, PeerLost):
            raise PeerLost(
                f"{self._what}, sent by rank {self._rank}: {self._error}", ranks=self._error.ranks
            ) from self._error
        if self._error is not None:
            raise RunError(f"{self._what}, sent by rank {self._rank}, failed: {self._error}") from self._error
