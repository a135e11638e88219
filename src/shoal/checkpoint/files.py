"""The names inside a ``checkpoints`` folder, and every way in which its files and folders are opened.

::

    step-00000100/                              a committed checkpoint
        manifest.json  rank-000.safetensors ...
        good                                    empty, there once a step was taken from this checkpoint
    .tmp-step-00000100-<id>/                    being written, or left by a save that died
    .replaced-step-00000100-<id>/               what had that name before a save took it
    .expired-step-00000050-<id>/                being deleted by retention
    .aside-step-00000100-<id>/                  a whole one from which no step could be taken; no run goes on from it

Only a rename gives a folder its committed name, and an id is drawn anew for every save. A new file never replaces an existing
one, and an old one is never opened through a link: reading goes through the descriptor of the checkpoint's own folder, so that
no name in it, and no swap of a folder meanwhile, can lead outside.
"""

import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from shoal.core.errors import RequestError, RunError

MANIFEST = "manifest.json"
GOOD = "good"
HOSTS = "hosts.json"
"""Which host had which file, in a folder that has some of a checkpoint's files; for messages, and believed for nothing else."""

_STEP = re.compile(r"step-([0-9]{8,18})", re.ASCII)
_BESIDE = re.compile(r"\.(tmp|replaced|expired|aside|brought)-(step-[0-9]{8,18})-([0-9a-f]{16})", re.ASCII)
_SHARD = re.compile(r"rank-[0-9]{3,6}\.safetensors", re.ASCII)
_ID = re.compile(r"[0-9a-f]{16}", re.ASCII)


class Beside(StrEnum):
    """Why a folder stands beside the committed ones."""

    DRAFT = "tmp"
    REPLACED = "replaced"
    EXPIRED = "expired"
    ASIDE = "aside"
    BROUGHT = "brought"


@dataclass(frozen=True, kw_only=True)
class BesideName:
    """A parsed name of a folder beside the committed ones."""

    kind: Beside
    step: int
    id: str


def draw_id() -> str:
    """An id that no save had before."""
    return secrets.token_hex(8)


def is_id(text: str) -> bool:
    """True for what ``draw_id`` can give."""
    return _ID.fullmatch(text) is not None


def step_name(step: int) -> str:
    """``100`` -> ``step-00000100``."""
    return f"step-{step:08d}"


def parse_step(name: str) -> int | None:
    """The step of a committed folder's name; None for every other name, also for one that ``step_name`` would write otherwise."""
    match = _STEP.fullmatch(name)
    if match is None or step_name(int(match[1])) != name:
        return None
    return int(match[1])


def shard_name(rank: int) -> str:
    """``0`` -> ``rank-000.safetensors``."""
    return f"rank-{rank:03d}.safetensors"


def is_shard_name(name: str) -> bool:
    """True for a plain name of a shard: no folder, no dots that lead elsewhere."""
    return _SHARD.fullmatch(name) is not None


def beside_name(kind: Beside, step: int, id: str) -> str:
    """The name of a folder that stands beside the committed ones."""
    return f".{kind.value}-{step_name(step)}-{id}"


def parse_beside(name: str) -> BesideName | None:
    """The parts of such a name, or None for a name that is not ours."""
    match = _BESIDE.fullmatch(name)
    if match is None:
        return None
    step = parse_step(match[2])
    return None if step is None else BesideName(kind=Beside(match[1]), step=step, id=match[3])


class NotWhole(RunError):
    """A checkpoint was refused: torn, truncated, altered or hostile. The message names the file and both numbers."""


@contextmanager
def new_file(path: Path) -> Iterator[int]:
    """A descriptor for writing a file that must not exist yet; fsynced at the end, removed when anything fails."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        try:
            yield fd
            os.fsync(fd)
        finally:
            os.close(fd)
    except BaseException:
        # A full disk gets its space back at once, before anyone else asks for it.
        path.unlink(missing_ok=True)
        raise


@contextmanager
def folder(path: Path) -> Iterator[int]:
    """A descriptor of an existing folder that is not a link.

    Raises:
        RequestError: there is no such folder.
        NotWhole: it is a link or not a folder.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise RequestError(f"no such checkpoint: {path}") from None
    except OSError as error:
        raise NotWhole(f"{path} is a link, or not a folder: {error.strerror}") from error
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def existing_file(folder_fd: int | None, name: str) -> Iterator[tuple[int, int]]:
    """The descriptor and the size of a regular file directly inside a folder; None for a file that is named by its path.

    Raises:
        NotWhole: it is missing, a link, a pipe, a device or a folder, or cannot be opened.
    """
    # Non-blocking, because opening a named pipe would otherwise wait for a writer that never comes.
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder_fd)
    except FileNotFoundError:
        raise NotWhole(f"{name} is missing") from None
    except OSError as error:
        raise NotWhole(f"{name} is a link, or cannot be opened: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise NotWhole(f"{name} is not a regular file")
        yield fd, status.st_size
    finally:
        os.close(fd)


def read_into(fd: int, buffer: memoryview, offset: int, name: str) -> None:
    """Fill ``buffer`` from a file.

    Raises:
        NotWhole: the file ends before, or the disk cannot read it.
    """
    filled = 0
    while filled < len(buffer):
        try:
            count = os.preadv(fd, [buffer[filled:]], offset + filled)
        except OSError as error:
            raise NotWhole(f"{name} cannot be read at byte {offset + filled}: {error.strerror}") from error
        if count == 0:
            raise NotWhole(f"{name} ends at byte {offset + filled} while it is being read")
        filled += count


def sync_folder(path: Path) -> None:
    """Make the names inside a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
