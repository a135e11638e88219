"""Bytes of tensors: seen without a copy, copied in pieces between which others run, and received into memory that is used again.

A payload is a torch tensor on the CPU, a numpy array, or anything with the buffer protocol; it must be contiguous. torch is not
imported here: a center or a candidate in an election starts without it.
"""

import asyncio
import os
import sys
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeAlias

import numpy as np

CHUNK_BYTES = 1 << 20
"""A longer payload crosses in messages of this size: several times faster than in one, and a limit for every frame."""
CHUNKS_A_TURN = 4
"""Sent or received one after the other before others of the event loop have their turn."""
PIECE_BYTES = 8 << 20
"""Copied without a pause: about a millisecond."""
_GRAIN_BYTES = 1 << 20
_HELPED_BYTES = 2 << 20
_HAS_CORES = (os.cpu_count() or 1) > 1
_SPARE_BYTES = 512 << 20
"""Kept for the next payloads at most."""

Payload: TypeAlias = Any
"""A torch tensor on the CPU, a numpy array, or bytes, a bytearray or a memoryview."""


def describe(payload: Payload) -> tuple[memoryview, str, tuple[int, ...]]:
    """The payload's bytes (not a copy), dtype and shape."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(payload, torch.Tensor):
        assert payload.device.type == "cpu" and payload.is_contiguous(), "a payload is contiguous and on the CPU"
        flat = payload.detach().reshape(-1).view(torch.uint8).numpy()
        return see(flat), str(payload.dtype).removeprefix("torch."), tuple(payload.shape)
    if isinstance(payload, np.ndarray):
        assert payload.flags.c_contiguous, "a payload is contiguous"
        return see(payload.reshape(-1).view(np.uint8)), payload.dtype.name, payload.shape
    view = memoryview(payload)
    view = view.cast("B") if view.nbytes else memoryview(b"")
    return view, "uint8", (view.nbytes,)


def see(array: "np.ndarray[Any, Any]") -> memoryview:
    """The bytes of an array. Whatever is made of the view keeps the array."""
    # numpy's types do not say that an array has the buffer protocol.
    return memoryview(array)  # type: ignore[arg-type]


def copy(source: memoryview, target: memoryview) -> None:
    """Copy bytes; numpy lets other threads run meanwhile, a slice of a memoryview does not.

    One core does not fill the bus of a machine that has several, so a second thread helps with what is long. Both take the next
    grain until none is left: where the second gets no core, the first has done all by itself and waits for nobody.
    """
    if not source.nbytes:
        return
    to, of = np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8)
    grains = iter(range(0, source.nbytes, _GRAIN_BYTES))

    def work() -> None:
        for at in grains:
            np.copyto(to[at : at + _GRAIN_BYTES], of[at : at + _GRAIN_BYTES])

    other = _helper().submit(work) if source.nbytes >= _HELPED_BYTES and _HAS_CORES else None
    work()
    if other is not None and not other.cancel():
        other.result()


@cache
def _helper() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "shoal-copy")


# A fork has none of its parent's threads, and would wait for one that is not there.
os.register_at_fork(after_in_child=_helper.cache_clear)


async def copy_politely(source: memoryview, target: memoryview) -> None:
    """Copy bytes in pieces; other work of the event loop is done between two of them."""
    for at in range(0, source.nbytes, PIECE_BYTES):
        if at:
            await asyncio.sleep(0)
        copy(source[at : at + PIECE_BYTES], target[at : at + PIECE_BYTES])


class SpareBuffers:
    """Memory that payloads were received into, for the next ones of the same length.

    Fresh memory for 64 MB costs the kernel as much time as the copy itself.
    """

    def __init__(self, max_bytes: int = _SPARE_BYTES) -> None:
        self._max_bytes = max_bytes
        # Appended to by whatever thread lets go of a payload; taken from by the event loop.
        self._spare: deque[np.ndarray[Any, Any]] = deque()

    def take(self, num_bytes: int) -> memoryview:
        """Memory of this length, not cleared, which comes back by itself when nothing refers to it."""
        if num_bytes <= CHUNK_BYTES:
            return see(np.empty(num_bytes, np.uint8))
        memory = None
        for _ in range(len(self._spare)):
            candidate = self._spare.popleft()
            if memory is None and candidate.nbytes == num_bytes:
                memory = candidate
            else:
                self._spare.append(candidate)
        if memory is None:
            memory = np.empty(num_bytes, np.uint8)
        array = memory[:]
        weakref.finalize(array, self._come_back, memory).atexit = False
        return see(array)

    def _come_back(self, memory: "np.ndarray[Any, Any]") -> None:
        self._spare.append(memory)
        while sum(spare.nbytes for spare in list(self._spare)) > self._max_bytes:
            self._spare.popleft()
