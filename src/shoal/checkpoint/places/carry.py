"""A file from one rank to another: the one that wants it asks for each chunk, and checks its sum before it writes it.

Who asks decides, so a full disk or a wrong sum ends the transfer at the next chunk and leaves the group in order. Lengths are
checked on both sides before memory is taken. No objects and no pickle: integers and bytes, as tensors, over the group that votes
on saves.
"""

import hashlib
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.checkpoint.files import NotWhole, existing_file, folder, new_file, read_into
from shoal.checkpoint.manifest import MAX_BYTES
from shoal.checkpoint.shard import FileEntry, check_chunk
from shoal.checkpoint.vote import LostTouch
from shoal.core.clock import Deadline
from shoal.core.errors import RequestError

_LARGEST = 64 * 2**20
_LEAST_SECONDS = 0.05
_TAG = 19


class Peer:
    """Another rank, as this one sends to it and receives from it.

    Args:
        group: of all ranks, which no other thread uses meanwhile.
        rank: of the other end.
        deadline: of all that crosses.
        where: what it is for, in messages.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, *, deadline: Deadline, where: str) -> None:
        self.rank = rank
        self._group = group
        self._deadline = deadline
        self._where = where

    def send(self, tensor: Tensor) -> None:
        """Send a tensor whose type and length the other end expects.

        Raises:
            LostTouch: it did not take it in time.
        """
        self._wait(lambda: self._group.send([tensor], self.rank, _TAG))

    def receive(self, tensor: Tensor) -> Tensor:
        """Fill a tensor with what the other end sends.

        Raises:
            LostTouch: nothing came in time.
        """
        self._wait(lambda: self._group.recv([tensor], self.rank, _TAG))
        return tensor

    def _wait(self, post: Callable[[], dist.Work]) -> None:
        # One that is dead already is found out as the operation is posted.
        try:
            post().wait(timedelta(seconds=max(self._deadline.remaining, _LEAST_SECONDS)))
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise LostTouch(
                f"{self._where}: rank {self.rank} did not come within {self._deadline.seconds:g} s, or died: {reason}"
            ) from error

    def ask(self, start: int, length: int) -> memoryview | None:
        """Bytes of the file that the other end serves; None when it cannot read them."""
        self.send(torch.tensor([start, length], dtype=torch.int64))
        if not int(self.receive(torch.zeros(1, dtype=torch.int64))):
            return None
        return self.receive(torch.empty(length, dtype=torch.uint8)).numpy().data

    def end(self) -> None:
        """Let the other end stop serving."""
        self.send(torch.tensor([0, 0], dtype=torch.int64))


def serve_file(peer: Peer, where: Path, name: str) -> None:
    """Answer what the other end asks of a file, until it has enough. What cannot be read is said to it, and not raised here.

    Raises:
        LostTouch: it went away.
    """
    while True:
        start, length = peer.receive(torch.zeros(2, dtype=torch.int64)).tolist()
        if length == 0:
            return
        data = _read(where, name, start, length)
        peer.send(torch.tensor([int(data is not None)], dtype=torch.int64))
        if data is not None:
            peer.send(torch.frombuffer(data, dtype=torch.uint8))


def _read(where: Path, name: str, start: int, length: int) -> bytearray | None:
    if not (start >= 0 and 0 < length <= _LARGEST):
        return None
    try:
        with folder(where) as folder_fd, existing_file(folder_fd, name) as (fd, size):
            if start + length > size:
                return None
            data = bytearray(length)
            read_into(fd, memoryview(data), start, name)
            return data
    except (NotWhole, RequestError):
        return None


def fetch_file(peer: Peer, where: Path, name: str, entry: FileEntry) -> str | None:
    """Bring a file that the other end serves; why it could not be, or None when every byte of it is here, and durable.

    Raises:
        LostTouch: the other end went away.
    """
    problem = None
    try:
        with new_file(where / name) as fd:
            for start, expected in zip(range(0, entry.size, entry.chunk_bytes), entry.sums, strict=True):
                chunk = peer.ask(start, min(entry.chunk_bytes, entry.size - start))
                if chunk is None:
                    raise NotWhole(f"{name} of rank {peer.rank} cannot be read at byte {start}")
                check_chunk(chunk, start, expected, f"{name} from rank {peer.rank}")
                while chunk:
                    chunk = chunk[os.write(fd, chunk) :]
    except OSError as error:
        problem = f"cannot write {name} of rank {peer.rank}: {error.strerror}"
    except NotWhole as error:
        problem = str(error)
    peer.end()
    return problem


def send_bytes(peer: Peer, data: bytes) -> None:
    """Send a manifest."""
    peer.send(torch.tensor([len(data)], dtype=torch.int64))
    if data:
        peer.send(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def receive_bytes(peer: Peer, digest: str) -> bytes:
    """A manifest of this SHA-256.

    Raises:
        LostTouch: the other end went away.
        NotWhole: it is another one, or too large.
    """
    length = int(peer.receive(torch.zeros(1, dtype=torch.int64)))
    if not 0 <= length <= MAX_BYTES:
        raise LostTouch(f"rank {peer.rank} has a manifest of {length} bytes, more than {MAX_BYTES}")
    data = peer.receive(torch.empty(length, dtype=torch.uint8)).numpy().tobytes() if length else b""
    if hashlib.sha256(data).hexdigest() != digest:
        raise NotWhole(f"the manifest of rank {peer.rank} is not the one that was agreed on")
    return data
