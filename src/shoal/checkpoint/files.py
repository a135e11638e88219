"""Every file and folder of a checkpoint is opened here: new ones never over an existing one, old ones never through a link.

Reading goes through the descriptor of the checkpoint's own folder, so that no name in it, and nobody who swaps a folder
meanwhile, can lead outside.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.core.errors import RequestError, RunError


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
def existing_file(folder_fd: int, name: str) -> Iterator[tuple[int, int]]:
    """The descriptor and the size of a regular file directly inside a folder.

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
