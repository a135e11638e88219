"""One file per epoch: it exists only while, or after, its leader held the lock on it.

A file is written beside, locked, and then linked to the name of its epoch. The link fails if that name is taken, so an epoch has
one owner; and as the lock travels with the file, there is no moment at which the name exists and a living owner does not hold it.
The kernel drops the lock when the owner dies, however it dies: that is how the others see a death at once. An owner that is only
paused keeps the lock; it is seen by its stamp, the time of its last renewal on CLOCK_BOOTTIME, which all processes of a machine
share and which counts while the machine sleeps.

The folder must be on a local file system. Nothing is synced to disk: a machine that loses power has lost all members too.
"""

import fcntl
import json
import os
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

_EPOCH_NAME = re.compile(r"epoch-(\d{8,})\.lease")
_CANDIDATE_PATTERN = "candidate-*.lease"
_STAMP_DIGITS = 20
_MAX_BYTES = 4096


def boot_seconds() -> float:
    """CLOCK_BOOTTIME: monotonic, one for all processes of the machine, and it counts while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, kw_only=True)
class LeaseText:
    """What a lease file says."""

    name: str
    address: str
    lease_seconds: float
    renewed_at: float
    """Seconds on CLOCK_BOOTTIME."""

    @property
    def runs_out_at(self) -> float:
        """When others may take over, on CLOCK_BOOTTIME."""
        return self.renewed_at + self.lease_seconds


class HeldLease:
    """An epoch's file with this process's lock on it. A child that is forked without exec would share the lock."""

    def __init__(self, descriptor: int, *, path: Path, epoch: int) -> None:
        self._descriptor = descriptor
        self.path = path
        self.epoch = epoch

    def stamp(self, now: float) -> None:
        """Write the time of a renewal."""
        os.pwrite(self._descriptor, _stamp_line(now), 0)

    def release(self) -> None:
        """Drop the lock; the file stays, so that the epoch is never given out again."""
        os.close(self._descriptor)

    def withdraw(self) -> None:
        """Drop the lock and remove the file, unless the name belongs to another file by now."""
        try:
            if os.path.samestat(os.stat(self.path), os.fstat(self._descriptor)):
                self.path.unlink()
        except FileNotFoundError:
            pass
        self.release()


def take_epoch(folder: Path, epoch: int, *, name: str, address: str, lease_seconds: float) -> HeldLease | None:
    """Make the file of this epoch, locked; None when somebody else has it already."""
    beside = folder / _CANDIDATE_PATTERN.replace("*", secrets.token_hex(8))
    path = lease_path(folder, epoch)
    descriptor = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    text = json.dumps({"name": name, "address": address, "lease_seconds": lease_seconds}).encode()
    assert len(text) < _MAX_BYTES // 2
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(descriptor, _stamp_line(boot_seconds()) + text + b"\n")
        os.link(beside, path)
    except OSError as error:
        os.close(descriptor)
        # Blocked or not found: a sweep took our file for a dead candidate's, in the moment before it was locked.
        if isinstance(error, BlockingIOError | FileExistsError | FileNotFoundError):
            return None
        raise
    finally:
        beside.unlink(missing_ok=True)
    return HeldLease(descriptor, path=path, epoch=epoch)


def lease_path(folder: Path, epoch: int) -> Path:
    """Where the file of this epoch is."""
    return folder / f"epoch-{epoch:08d}.lease"


def newest_epoch(folder: Path) -> int:
    """The highest epoch that has a file; 0 without any."""
    return max(list_epochs(folder), default=0)


def list_epochs(folder: Path) -> list[int]:
    """The epochs that have a file, in order."""
    matches = (_EPOCH_NAME.fullmatch(name) for name in os.listdir(folder))
    return sorted(int(match[1]) for match in matches if match is not None)


def read_live(path: Path, *, now: float) -> LeaseText | None:
    """What the file says, if its owner lives and its lease has not run out; None otherwise. Never blocks."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        # A shared lock, so that those who look do not take each other for the owner.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        text = _read_text(descriptor)
        return text if now < text.runs_out_at else None
    finally:
        os.close(descriptor)
    return None


def sweep(folder: Path, *, below: int) -> None:
    """Remove the files of epochs below this one, and what candidates that died in the middle left behind."""
    for epoch in list_epochs(folder):
        if epoch < below:
            lease_path(folder, epoch).unlink(missing_ok=True)
    for path in folder.glob(_CANDIDATE_PATTERN):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except BlockingIOError:
            pass
        finally:
            os.close(descriptor)


def _stamp_line(now: float) -> bytes:
    # Twice, because a reader may see half of a write; digits of both halves that agree are one stamp.
    stamp = f"{int(now * 1e9):0{_STAMP_DIGITS}d}"
    return f"{stamp} {stamp}\n".encode()


def _read_text(descriptor: int) -> LeaseText:
    """Parse a locked file. It was whole before it had its name, so only the stamp can be caught in the middle of a write."""
    while True:
        stamps, _, rest = os.pread(descriptor, _MAX_BYTES, 0).decode().partition("\n")
        first, _, second = stamps.partition(" ")
        if first == second:
            said = json.loads(rest)
            return LeaseText(
                name=str(said["name"]),
                address=str(said["address"]),
                lease_seconds=float(said["lease_seconds"]),
                renewed_at=int(first) / 1e9,
            )
