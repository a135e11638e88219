"""Any other scheme, by ``fsspec``. How whole its writes are and whether a create is exclusive is the file system's affair."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from shoal.core.errors import RequestError, ShoalError
from shoal.data.storage.attempts import Attempts, Part, Transient
from shoal.data.storage.config import StorageConfig
from shoal.data.storage.protocol import Entry, already_there, check_path, join, missing
from shoal.data.storage.timebox import within

Result = TypeVar("Result")
_PIECE = 8 << 20


class FsspecStorage:
    """What ``fsspec`` has under an address."""

    def __init__(self, address: str, settings: StorageConfig) -> None:
        """``address``: scheme and host, or the scheme alone.

        Raises:
            RequestError: ``fsspec`` does not know the scheme, or lacks a package for it.
        """
        # Only where such an address is asked for: importing it takes a moment.
        import fsspec

        self._address = address
        self._settings = settings
        self._attempts = Attempts(address, settings)
        self.calls = self._attempts.calls
        scheme = address.partition("://")[0]
        try:
            self._files, base = fsspec.core.url_to_fs(address, **settings.options)
        except ValueError as error:
            known = "a path, file, memory, http, https, s3, gs, az, hdfs, webhdfs, hive, or a scheme of fsspec"
            raise RequestError(f"{address!r}: nobody knows {scheme}:// ({error}); use {known}") from None
        except ImportError as error:
            raise RequestError(f"{address!r} needs a package that is not installed: {error}") from None
        except Exception as error:
            raise RequestError(f"{address!r}: {type(error).__name__}: {error}") from error
        self._base = str(base).rstrip("/")

    @property
    def address(self) -> str:
        """Scheme and host."""
        return self._address

    def stat(self, path: str) -> Entry:
        """Size and version of a file."""
        found = self._run("asking for the size", path, lambda: self._files.info(self._full(path)))
        if found.get("type") == "directory":
            raise missing(self._address, path)
        return self._entry(path, found)

    def read(self, path: str, start: int = 0, end: int | None = None) -> bytes:
        """Exactly these bytes."""
        found = self.stat(path)

        def pieces(at: int, until: int) -> Iterator[bytes]:
            for begin in range(at, until, _PIECE):
                stop = min(until, begin + _PIECE)
                yield self._once(path, partial(self._range, path, begin, stop))

        def part(at: int, until: int | None) -> Part:
            stop = found.size if until is None else min(until, found.size)
            return Part(size=found.size, version=found.version, chunks=pieces(at, stop))

        return self._attempts.read(path, start, end, part)

    def list(self, folder: str) -> Iterator[Entry]:
        """All files below a folder, sorted by path."""
        top = f"{self._base}/{folder.strip('/')}".rstrip("/")
        found = self._run("listing", folder, lambda: self._files.find(top, detail=True))
        prefix = len(self._base) + 1
        entries = [self._entry(name[prefix:], each) for name, each in found.items()]
        yield from sorted(entries, key=lambda entry: entry.path)

    def create(self, path: str, content: bytes) -> None:
        """Write a file that is not there yet."""
        try:
            self._run("creating", path, lambda: self._put(path, content, "create"))
        except (NotImplementedError, TypeError) as error:
            raise RequestError(
                f"{join(self._address, path)}: {type(self._files).__name__} has no exclusive create ({error}), which appending "
                "to a store needs; write to a folder, s3://, gs://, az:// or hdfs://"
            ) from None

    def replace(self, path: str, content: bytes) -> None:
        """Write a file, over the one that is there."""
        self._run("writing", path, lambda: self._put(path, content, "overwrite"))

    def delete(self, path: str) -> None:
        """Delete a file; nothing happens where there is none."""
        try:
            self._run("deleting", path, lambda: self._files.rm_file(self._full(path)))
        except FileNotFoundError:
            return
        except RequestError:
            return

    def _range(self, path: str, start: int, end: int) -> bytes:
        return bytes(self._files.cat_file(self._full(path), start=start, end=end))

    def _put(self, path: str, content: bytes, mode: str) -> None:
        full = self._full(path)
        self._files.makedirs(self._files._parent(full), exist_ok=True)
        self._files.pipe_file(full, content, mode=mode)

    def _run(self, what: str, path: str, action: Callable[[], Result]) -> Result:
        return self._attempts.run(what, path, lambda: self._once(path, action))

    def _once(self, path: str, action: Callable[[], Result]) -> Result:
        try:
            return within(self._settings.timeout, action)
        except FileNotFoundError:
            raise missing(self._address, path) from None
        except FileExistsError:
            raise already_there(self._address, path) from None
        except (NotImplementedError, TypeError, ShoalError, Transient):
            raise
        except Exception as error:
            # Whatever library speaks to the store raises what it likes; all of it is the store's refusal.
            raise Transient(f"{type(error).__name__}: {error}") from error

    def _full(self, path: str) -> str:
        return f"{self._base}/{check_path(self._address, path)}"

    def _entry(self, path: str, found: dict[str, Any]) -> Entry:
        said = next(
            (
                found[name]
                for name in ("ETag", "etag", "mtime", "modified", "LastModified", "created")
                if found.get(name)
            ),
            "",
        )
        return Entry(path=path, size=int(found["size"] or 0), version=str(said))
