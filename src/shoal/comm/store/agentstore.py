"""A ``torch.distributed`` store whose keys are held by the coordinator of a run on several hosts.

Why ours: torch's ``TCPStore`` asks nobody who he is; whoever reaches its port can read, change and delete every key, and so bring
the ranks of a run to any address. Here a rank talks to the agent that started it, over a unix socket without a name that it has
inherited, and the agent to the coordinator over the remote shell: nothing listens on a network.
"""

import itertools
import os
import socket
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store  # torch types this name only there

from shoal.comm.store.messages import Answer, Ask, Messages, Operation, encode

_SLACK_SECONDS = 30.0
"""How much longer than the store an answer is waited for: the store says what was missing."""
_READ_BYTES = 64 * 1024


class AgentStore(Store):
    """The store of a rank whose host has an agent.

    Args:
        path: of the agent's socket, ``/proc/self/fd/N``.
    """

    timeout: timedelta
    """How long keys are waited for; torch's own, which ``set_timeout`` sets."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path
        self._numbers = itertools.count()
        # A thread that waits for a key must not keep another one from setting it.
        self._of_thread = threading.local()

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self._ask("set", [key], value=_bytes(value))

    def get(self, key: str) -> bytes:
        """The value of a key, waited for as long as the store's timeout says."""
        return self._ask("get", [key], seconds=self.timeout.total_seconds()).value

    def add(self, key: str, value: int) -> int:
        """Add to a key that is a number, 0 where it is not there; the sum."""
        return self._ask("add", [key], amount=value).amount

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set a key if it is what is expected; what it is then."""
        return self._ask("compare_set", [key], value=_bytes(desired_value), expected=_bytes(expected_value)).value

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return bool(self._ask("check", keys).amount)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there."""
        self._ask("wait", keys, seconds=(timeout or self.timeout).total_seconds())

    def delete_key(self, key: str) -> bool:
        """Delete a key; False where it was not there."""
        return bool(self._ask("delete", [key]).amount)

    def num_keys(self) -> int:
        """How many keys there are."""
        return self._ask("count", []).amount

    def clone(self) -> "AgentStore":
        """Another way to the same keys."""
        made = AgentStore(self._path)
        made.set_timeout(self.timeout)
        return made

    # By these names torch's own C++ code calls a store that is written in Python.
    deleteKey = delete_key
    getNumKeys = num_keys

    def _ask(
        self,
        operation: Operation,
        keys: Sequence[str],
        *,
        value: bytes = b"",
        expected: bytes = b"",
        amount: int = 0,
        seconds: float = 0.0,
    ) -> Answer:
        ask = Ask(
            number=next(self._numbers),
            operation=operation,
            keys=tuple(keys),
            value=value,
            expected=expected,
            amount=amount,
            seconds=seconds,
        )
        what = f"{operation} {', '.join(keys[:3])}"
        try:
            answer = self._exchange(ask, seconds + _SLACK_SECONDS)
        except OSError as error:
            self._hang_up()
            raise dist.DistStoreError(f"the agent of this host did not answer {what}: {error}") from error
        if answer.error:
            raise dist.DistStoreError(f"{what}: {answer.error}")
        return answer

    def _exchange(self, ask: Ask, seconds: float) -> Answer:
        line: Any = self._of_thread
        # Not that of the process that this one was forked from.
        if getattr(line, "owner", 0) != os.getpid():
            line.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            line.messages, line.owner = Messages(Answer), os.getpid()
            line.socket.settimeout(_SLACK_SECONDS)
            line.socket.connect(self._path)
        line.socket.settimeout(seconds)
        line.socket.sendall(encode(ask))
        while True:
            data = line.socket.recv(_READ_BYTES)
            if not data:
                raise ConnectionResetError("it is gone")
            for answer in line.messages.feed(data):
                if answer.number == ask.number:
                    found: Answer = answer
                    return found

    def _hang_up(self) -> None:
        line: Any = self._of_thread
        if getattr(line, "socket", None) is not None:
            line.socket.close()
        line.owner = 0


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
