"""The election on one machine: a folder of lease files. No server, and a death is seen within milliseconds.

A candidate takes the epoch after the newest when the newest one's owner is dead or its lease has run out. It then waits until
every older epoch still in the folder is over, by the same two signs, before it leads. That second wait is what makes two valid
leases at one moment impossible: a leader stamps its file, only then looks for a newer epoch, and only then counts the renewal; a
challenger makes the newer epoch, and only then reads the stamp for the last time. Whichever came first is seen by the other.

Epochs whose files are swept cannot come back either: a candidate that was paused for long and then takes a swept name finds a
newer epoch in the folder, and withdraws.

There is one file for each epoch. It exists only while, or after, its leader held the lock on it.

It is written beside, locked, and then linked to the name of its epoch. The link fails if that name is taken, so an epoch has
one owner; and as the lock travels with the file, there is no moment at which the name exists and a living owner does not hold it.
The kernel drops the lock when the owner dies, however it dies: that is how the others see a death at once. An owner that is only
paused keeps the lock; it is seen by its stamp, the time of its last renewal on CLOCK_BOOTTIME, which all processes of a machine
share and which counts while the machine sleeps.

The folder must be on a local file system. Nothing is synced to disk: a machine that loses power has lost all members too.
"""

import asyncio
import fcntl
import json
import os
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from shoal.core.clock import Deadline
from shoal.core.errors import RequestError
from shoal.elastic.election.elector import Center, Deposed

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


POLL_SECONDS = 0.02
"""How often a candidate looks: this is how long a dead leader goes unnoticed."""

_KEPT_EPOCHS = 4
"""Files of older epochs that are left for people to look at."""

_MARGIN = 0.1
"""The part of the lease that the leader itself does not use: time for an instruction on its way out."""


class FileLease:
    """One candidate. See ``Elector``.

    Args:
        folder: where the lease files are, on a local file system; made if need be.
        name: who this is, for people.
        address: where the members find this candidate when it leads.
        lease_seconds: how long a leader may be silent before it is replaced.

    Raises:
        RequestError: the lease is too short to be renewed in time.
    """

    def __init__(self, folder: Path, *, name: str, address: str, lease_seconds: float = 3.0) -> None:
        if lease_seconds < 10 * POLL_SECONDS:
            raise RequestError(
                f"the lease of {lease_seconds:g} s is shorter than {10 * POLL_SECONDS:g} s, in which nobody can renew it reliably"
            )
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.name = name
        self.address = address
        self.lease_seconds = lease_seconds
        self._held: HeldLease | None = None
        self._runs_out_at = float("-inf")
        self._epoch = 0

    @property
    def epoch(self) -> int:
        """See ``Elector``."""
        return self._epoch

    async def campaign(self) -> int:
        """See ``Elector``. A dead leader is replaced within ``POLL_SECONDS``, a silent one when its lease has run out."""
        self._drop()
        try:
            while not self._attempt():
                await asyncio.sleep(POLL_SECONDS)
        except asyncio.CancelledError:
            self._drop()
            raise
        assert self._held is not None
        self._epoch = self._held.epoch
        sweep(self.folder, below=self._epoch - _KEPT_EPOCHS)
        return self._epoch

    async def advance(self) -> int:
        """See ``Elector``."""
        held = self._require_held()
        started = boot_seconds()
        following = self._take(held.epoch + 1)
        if following is None:
            raise self._depose(f"another candidate took epoch {held.epoch + 1}")
        held.release()
        self._held = following
        if newest_epoch(self.folder) != following.epoch:
            following.withdraw()
            self._held = None
            raise self._depose(f"epoch {following.epoch} was over before it could be taken")
        self._epoch = following.epoch
        self._runs_out_at = started + self.lease_seconds
        sweep(self.folder, below=self._epoch - _KEPT_EPOCHS)
        return self._epoch

    async def renew(self) -> None:
        """See ``Elector``."""
        self._require_held()
        if not self._extend():
            raise self._depose("its file is not the newest one any more")

    def is_valid(self) -> bool:
        """See ``Elector``."""
        return boot_seconds() < self._runs_out_at - _MARGIN * self.lease_seconds

    async def resign(self) -> None:
        """See ``Elector``."""
        self._drop()

    def _attempt(self) -> bool:
        """One look at the folder; True when this candidate leads."""
        if self._held is None:
            newest = newest_epoch(self.folder)
            if self._is_alive(newest):
                return False
            self._held = self._take(newest + 1)
            if self._held is None:
                return False
        epochs = list_epochs(self.folder)
        if self._held.epoch != max(epochs, default=0):
            # The name was free because it had been swept, or others took us for paused.
            self._held.withdraw()
            self._held = None
            return False
        if any(self._is_alive(epoch) for epoch in epochs if epoch < self._held.epoch):
            # An owner renewed before it could see us; it is valid until then. Meanwhile we must not be taken for dead.
            self._held.stamp(boot_seconds())
            return False
        return self._extend()

    def _extend(self) -> bool:
        """Stamp, look, count: in this order. False when there is a later epoch, or somebody removed the file."""
        assert self._held is not None
        now = boot_seconds()
        self._held.stamp(now)
        if newest_epoch(self.folder) != self._held.epoch:
            return False
        self._runs_out_at = now + self.lease_seconds
        return True

    def _is_alive(self, epoch: int) -> bool:
        return read_live(lease_path(self.folder, epoch), now=boot_seconds()) is not None

    def _take(self, epoch: int) -> HeldLease | None:
        return take_epoch(self.folder, epoch, name=self.name, address=self.address, lease_seconds=self.lease_seconds)

    def _require_held(self) -> HeldLease:
        if self._held is None:
            raise self._depose("it does not lead")
        if boot_seconds() >= self._runs_out_at:
            raise self._depose(f"it did not renew within its lease of {self.lease_seconds:g} s")
        return self._held

    def _depose(self, why: str) -> Deposed:
        self._drop()
        return Deposed(f"candidate {self.name!r} was deposed from epoch {self._epoch}: {why}; it may campaign again")

    def _drop(self) -> None:
        self._runs_out_at = float("-inf")
        if self._held is not None:
            self._held.release()
            self._held = None


def read_center(folder: Path) -> Center | None:
    """Who leads now, as the folder tells it; None while nobody does. Never waits: a few system calls."""
    try:
        epoch = newest_epoch(folder)
    except FileNotFoundError:
        return None
    text = read_live(lease_path(folder, epoch), now=boot_seconds())
    return None if text is None else Center(epoch=epoch, address=text.address, name=text.name)


async def find_center(folder: Path, *, deadline: Deadline) -> Center:
    """Wait until somebody leads.

    Raises:
        RunError: nobody did within the deadline.
    """
    while (center := read_center(folder)) is None:
        deadline.check(f"a center to be elected in {folder}")
        await asyncio.sleep(POLL_SECONDS)
    return center
