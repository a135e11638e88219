"""A process that dies with its parent, so that ``kill -9`` of a supervisor leaves nothing running.

torchrun's workers were measured to be alive 181 s after their agent was killed: a killed process cannot clean up, so the child
has to arrange its own end. On Linux the kernel does it (``PR_SET_PDEATHSIG``); elsewhere a thread watches for a new parent.

Two properties of the kernel's promise bind the callers. It fires when the *thread* that spawned the child ends, so ranks are
spawned from the main thread. It is not inherited by grandchildren, so each loader worker calls this for itself.
"""

import ctypes
import os
import signal
import sys
import threading
import time
import traceback

from shoal.core.errors import EXIT_NO, RunError

_PR_SET_PDEATHSIG = 1
_WATCH_EVERY_S = 0.5


def die_with_parent(expected_parent: int | None = None) -> None:
    """Arrange that this process is killed when its parent dies.

    Args:
        expected_parent: pid of the process that started this one. A parent that died before this call can only be noticed by
            comparing, so give it where it is known; None trusts the present parent.

    Raises:
        RunError: the kernel refused.
    """
    parent = os.getppid() if expected_parent is None else expected_parent
    if sys.platform == "linux":
        _ask_kernel()
    else:
        threading.Thread(target=_watch, args=(parent,), name="parent-death", daemon=True).start()
    # After the request, not before: a parent that dies between a check and the request would be missed for ever.
    if os.getppid() != parent:
        _die()


def end_if_forked(owner: int) -> None:
    """End this process if it is a fork of ``owner`` that came back to its last lines: what it did or raised is not that one's.

    An exception that is being handled is printed, as Python would have done.
    """
    if os.getpid() == owner:
        return
    error = sys.exception()
    if error is not None and not isinstance(error, SystemExit):
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    asked = error.code if isinstance(error, SystemExit) else EXIT_NO
    os._exit(asked if isinstance(asked, int) else int(asked is not None))


def _ask_kernel() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise RunError(
            f"prctl(PR_SET_PDEATHSIG) failed: {os.strerror(code)}; this process would outlive its supervisor"
        )


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_WATCH_EVERY_S)
    _die()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
