"""Sleeping on a word of shared memory until another process changes it: Linux's ``futex``, called through ``ctypes``.

Python has no primitive that waits across unrelated processes without a name in the file system: ``multiprocessing``'s semaphores
have one, which a killed process leaves behind, and a pipe costs two system calls and a copy for every message. A futex is four
bytes of the memory that is shared anyway, and the kernel is asked only to sleep and to wake.

**Why a reader that saw the count sees the payload too.** A writer stores its payload with plain stores and then calls
``advance``; a reader loads the count until it has changed, calls ``order_loads`` and then loads the payload.

- The count is changed inside the kernel, by ``FUTEX_WAKE_OP``. On arm64 that is a store-release (``stlxr``) followed by a full
  barrier, so every store before it is visible first. On x86 it is a locked instruction, and stores are in order anyway.
  Python's own store to the word would be enough on x86 only.
- On x86 loads are in order too. On arm64 a load of the payload could be done before the load of the count, so ``order_loads``
  makes a system call that holds a full barrier before anything else (``FUTEX_WAKE`` has one, so as not to miss a waiter). It
  costs about a microsecond and is left out on x86.
- No wake is lost: the kernel compares the word under the lock that the waker takes after it has changed the word.
"""

import ctypes
import errno
import os
import platform
import sys

_CALL_NUMBERS = {"x86_64": 202, "aarch64": 98}
_MACHINE = platform.machine()
_CALL_NUMBER = _CALL_NUMBERS.get(_MACHINE, 0)

# None is FUTEX_PRIVATE: the word is in several processes.
_WAIT, _WAKE, _WAKE_OP = 0, 1, 5
_EVERYBODY = 0x7FFFFFFF
# FUTEX_OP(ADD, 1, CMP_LT, 0): add one to the word. The comparison only decides about waking a second word, which is the same one.
_ADD_ONE = (1 << 28) | (2 << 24) | (1 << 12)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_ARGUMENTS = (
    ctypes.c_long,  # number of the call
    ctypes.c_void_p,  # the word
    ctypes.c_int,  # what to do
    ctypes.c_uint32,  # expected value, or number to wake
    ctypes.c_void_p,  # timeout, or number to wake on the second word
    ctypes.c_void_p,  # the second word
    ctypes.c_uint32,  # what to do to the second word
)


def _load(library: type[ctypes.CDLL]) -> "ctypes._NamedFuncPointer":
    call = library(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    call.argtypes = _ARGUMENTS
    return call


if sys.platform == "linux":
    # Sleeping gives the interpreter's lock away. Waking keeps it: the call returns at once, and a thread that took the lock in
    # between would hold up this rank for the switch interval of 5 ms.
    _sleeping_call, _quick_call = _load(ctypes.CDLL), _load(ctypes.PyDLL)


def is_supported() -> bool:
    """True where the calls below work."""
    return sys.platform == "linux" and _CALL_NUMBER != 0 and sys.byteorder == "little"


def advance(address: int) -> None:
    """Add one to the 32-bit word at ``address``, after every store before this call, and wake all who sleep on it."""
    if _quick_call(_CALL_NUMBER, address, _WAKE_OP, _EVERYBODY, 0, address, _ADD_ONE) < 0:
        raise OSError(ctypes.get_errno(), f"futex wake: {os.strerror(ctypes.get_errno())}")


def sleep_while(address: int, value: int, seconds: float) -> None:
    """Sleep while the word at ``address`` is ``value``, for at most ``seconds``; may return early, so look again."""
    time = _Timespec(int(seconds), int(seconds % 1.0 * 1e9))
    if _sleeping_call(_CALL_NUMBER, address, _WAIT, value, ctypes.addressof(time), 0, 0) < 0:
        code = ctypes.get_errno()
        # The word has changed, the time is up, or a signal came.
        if code not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
            raise OSError(code, f"futex wait: {os.strerror(code)}")


if _MACHINE == "x86_64":

    def order_loads(address: int) -> None:
        """Loads after this call are done after loads before it; ``address`` is any word that is mapped."""

else:

    def order_loads(address: int) -> None:
        """Loads after this call are done after loads before it; ``address`` is any word that is mapped."""
        _quick_call(_CALL_NUMBER, address, _WAKE, 0, 0, 0, 0)
