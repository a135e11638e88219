"""Signals as something to read in an event loop, instead of something that interrupts it anywhere.

While it is open, a signal becomes a byte on a socket. Nothing happens inside a handler, so no line of the supervisor is cut.
"""

import signal
import socket
import threading
from types import FrameType, TracebackType
from typing import Any

from shoal.core.errors import RunError

_CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalInbox:
    """Catches SIGINT, SIGTERM and SIGHUP while it is open; what was installed before is put back afterwards."""

    def __enter__(self) -> "SignalInbox":
        """Begin to catch.

        Raises:
            RunError: this is not the main thread, where alone Python takes signals.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RunError("ranks are started from the main thread: they die with the thread that started them")
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._previous: dict[int, Any] = {}
        for number in _CAUGHT:
            # nohup means: live on when the terminal goes away.
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            self._previous[number] = signal.signal(number, _do_nothing)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._previous_fd)
        self._reader.close()
        self._writer.close()

    def fileno(self) -> int:
        """What a selector watches."""
        return self._reader.fileno()

    def take(self) -> list[int]:
        """The signals that came since the last call, in order; those that are none of ours are left out."""
        try:
            return [number for number in self._reader.recv(4096) if number in self._previous]
        except BlockingIOError:
            return []


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """A handler has to exist for the wake-up byte to be written."""
