"""Signs of life between the ranks of a launcher that has no supervisor of ours: who is gone is named within a lease.

gloo notices the end of a process, but not a host without power or a cable that was pulled: its sockets stay open, and a
collective waits for its whole deadline. So each rank beats in the launcher's store, rank 0 looks who has stopped, and
everybody looks whether a failure was posted. A thread of its own asks the store, over a connection of its own; another one
sees that the store answers at all, because a request to a host that was cut off does not return.
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch._C._distributed_c10d import Store  # torch types this name only there

_JOIN_SECONDS = 5.0
_FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The first failure that was posted."""

    rank: int
    host: str
    text: str

    def __str__(self) -> str:
        return f"rank {self.rank} on host {self.host}: {self.text}"


class Beats:
    """This rank's signs of life, and its eyes on the others; ``close`` ends them.

    Args:
        store: of this round, over a connection that nobody else uses.
        rank: this one.
        hosts: by rank.
        lease_seconds: how long a rank, or the store, may be silent.
        end: called with a message when this process has to end; does not return in real use.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        hosts: list[str],
        lease_seconds: float,
        end: Callable[[str], None] | None = None,
    ) -> None:
        self._store = store
        self._rank, self._hosts = rank, hosts
        self._lease = lease_seconds
        self._end = end or end_process
        self._closing = threading.Event()
        self._answered = time.monotonic()
        self._seen: dict[int, tuple[bytes, float]] = {}
        self.failure: Failure | None = None
        """What was posted, once it was seen."""
        self._threads = [
            threading.Thread(target=target, name=f"beats-{target.__name__}", daemon=True)
            for target in (self._beat, self._watch)
        ]
        for thread in self._threads:
            thread.start()

    def post(self, text: str) -> Failure | None:
        """Say that this rank fails, unless another one has said so before: that failure. Returns soon where the store is gone."""
        failure = json.dumps({"rank": self._rank, "host": self._hosts[self._rank], "text": text[:4000]})
        poster = threading.Thread(target=self._post, args=(failure,), daemon=True)
        poster.start()
        poster.join(2.0)
        return self.failure

    def close(self) -> None:
        """Beat no more. A rank that is done is not missed."""
        self._closing.set()
        # An interpreter that ends while a thread is inside torch's store aborts.
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_SECONDS)
        with contextlib.suppress(RuntimeError):
            self._store.set(_beat(self._rank), "done")

    def await_failure(self, seconds: float) -> Failure | None:
        """The failure that was posted, waited for a moment: the rank that failed may be about to say so."""
        end = time.monotonic() + seconds
        while self.failure is None and time.monotonic() < end:
            time.sleep(0.05)
        return self.failure

    def _post(self, failure: str) -> None:
        with contextlib.suppress(RuntimeError):
            self._store.compare_set(_FAILED, "", failure)

    def _beat(self) -> None:
        count = 0
        while not self._closing.is_set():
            count += 1
            try:
                self._store.set(_beat(self._rank), str(count))
                self._look()
            except RuntimeError as error:
                # Whoever serves the store may simply be done; one that is silent is for the other thread.
                if self._closing.wait(self._lease / 2):
                    return
                self._give_up(f"the store of the run does not answer any more: {error}")
                return
            self._answered = time.monotonic()
            self._closing.wait(min(0.5, self._lease / 4))

    def _look(self) -> None:
        if self.failure is None and self._store.check([_FAILED]):
            found = json.loads(self._store.get(_FAILED))
            self.failure = Failure(rank=int(found["rank"]), host=str(found["host"]), text=str(found["text"]))
            if self.failure.rank != self._rank:
                threading.Thread(target=self._obey, daemon=True).start()
        if self._rank != 0:
            return
        now = time.monotonic()
        for other, host in enumerate(self._hosts):
            if other == 0 or not self._store.check([_beat(other)]):
                continue
            beat = self._store.get(_beat(other))
            before, since = self._seen.get(other, (b"", now))
            if beat != before:
                self._seen[other] = (beat, now)
            elif beat != b"done" and now - since > self._lease:
                silent = f"gave no sign of life for {now - since:.1f} s (elastic.lease_seconds {self._lease:g})"
                self._post(json.dumps({"rank": other, "host": host, "text": silent}))

    def _obey(self) -> None:
        # A moment, in which this rank's own collective most likely fails and says the same in better order.
        if not self._closing.wait(3.0):
            self._give_up(str(self.failure))

    def _watch(self) -> None:
        while not self._closing.wait(min(0.25, self._lease / 4)):
            silent = time.monotonic() - self._answered
            if silent > self._lease:
                self._give_up(
                    f"host {self._hosts[0]}, where rank 0 is, has not answered for {silent:.1f} s (elastic.lease_seconds "
                    f"{self._lease:g}): this host or that one is cut off"
                )
                return

    def _give_up(self, text: str) -> None:
        if not self._closing.is_set():
            self._closing.set()
            self._end(f"rank {self._rank} ends: {text}")


def end_process(text: str) -> None:
    """Print why, and end at once: the main thread waits inside a collective and cannot be reached."""
    print(f"error: {text}", file=sys.stderr, flush=True)
    os._exit(1)


def _beat(rank: int) -> str:
    return f"beat/{rank}"
