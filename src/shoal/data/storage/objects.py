"""Object stores: ``s3://bucket`` by ``obstore``, whose conditional put makes a create exclusive; ``gs://`` and ``az://`` alike.

Retries are ours, so that they are counted and end at one deadline. A put whose answer was lost may have happened: when the next
one finds the object there, its bytes say whether it was ours.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from shoal.core.errors import RequestError
from shoal.data.storage.attempts import Attempts, Part, Transient
from shoal.data.storage.config import StorageConfig
from shoal.data.storage.protocol import AlreadyThere, Entry, Unreachable, already_there, check_path, join, missing

Result = TypeVar("Result")


class ObjectStorage:
    """The objects of one bucket."""

    def __init__(self, address: str, settings: StorageConfig) -> None:
        """``address``: scheme and bucket.

        Raises:
            RequestError: ``obstore`` is not installed, or refuses the settings.
        """
        try:
            import obstore
            import obstore.store
        except ImportError:
            raise RequestError(f"{address} needs obstore: pip install 'shoal[s3]'") from None
        self._obstore: Any = obstore
        self._errors: Any = obstore.exceptions
        self._address = address.rstrip("/")
        self._attempts = Attempts(self._address, settings)
        self.calls = self._attempts.calls
        client: dict[str, Any] = {"timeout": f"{settings.timeout:g}s"}
        if settings.options.get("endpoint", "").startswith("http://"):
            client["allow_http"] = True
        try:
            # Its own retries would hide failures and outlast our deadline.
            options: dict[str, Any] = dict(settings.options)
            opened: Any = obstore.store.from_url
            self._store = opened(self._address, client_options=client, retry_config={"max_retries": 0}, **options)
        except Exception as error:
            raise RequestError(f"{self._address}: obstore refuses it: {error}") from error

    @property
    def address(self) -> str:
        """Scheme and bucket."""
        return self._address

    def stat(self, path: str) -> Entry:
        """Size and version of an object."""
        check_path(self._address, path)
        found = self._run("asking for the size", path, lambda: self._obstore.head(self._store, path))
        return Entry(path=path, size=found["size"], version=found["e_tag"] or "")

    def read(self, path: str, start: int = 0, end: int | None = None) -> bytes:
        """Exactly these bytes."""
        check_path(self._address, path)
        if start or end is not None:
            # A store answers a range that begins at or behind the end with an error that does not say where the end is.
            size = self.stat(path).size
            if start >= size or (end is not None and end <= start):
                return self._attempts.read(
                    path, start, end, lambda at, until: Part(size=size, version="", chunks=iter(()))
                )
        return self._attempts.read(path, start, end, lambda at, until: self._part(path, at, until))

    def list(self, folder: str) -> Iterator[Entry]:
        """All objects below a folder, sorted by path."""
        inside = folder.strip("/")

        def ask() -> list[Entry]:
            stream = self._obstore.list(self._store, f"{inside}/" if inside else None)
            return [
                Entry(path=str(each["path"]), size=each["size"], version=each["e_tag"] or "")
                for batch in stream
                for each in batch
            ]

        yield from sorted(self._run("listing", folder, ask), key=lambda entry: entry.path)

    def create(self, path: str, content: bytes) -> None:
        """Write an object that is not there yet."""
        check_path(self._address, path)
        before = self.calls.retries
        try:
            self._run("creating", path, lambda: self._obstore.put(self._store, path, content, mode="create"))
        except AlreadyThere:
            if self.calls.retries == before or self.read(path) != content:
                raise

    def replace(self, path: str, content: bytes) -> None:
        """Write an object, over the one that is there."""
        check_path(self._address, path)
        self._run("writing", path, lambda: self._obstore.put(self._store, path, content, mode="overwrite"))

    def delete(self, path: str) -> None:
        """Delete an object; nothing happens where there is none."""
        check_path(self._address, path)
        try:
            self._run("deleting", path, lambda: self._obstore.delete(self._store, path))
        except FileNotFoundError:
            return

    def _part(self, path: str, start: int, end: int | None) -> Part:
        def ask() -> Part:
            whole = not start and end is None
            wanted = {} if whole else {"range": {"offset": start} if end is None else (start, end)}
            found = self._obstore.get(self._store, path, options=wanted)
            return Part(
                size=found.meta["size"], version=found.meta["e_tag"] or "", chunks=self._chunks(path, found.stream())
            )

        return self._translated(path, ask)

    def _chunks(self, path: str, stream: Any) -> Iterator[bytes]:
        chunks = iter(stream)
        while (chunk := self._translated(path, lambda: next(chunks, None))) is not None:
            yield bytes(chunk)

    def _run(self, what: str, path: str, action: Callable[[], Result]) -> Result:
        return self._attempts.run(what, path, lambda: self._translated(path, action))

    def _translated(self, path: str, action: Callable[[], Result]) -> Result:
        errors = self._errors
        try:
            return action()
        except (errors.NotFoundError, FileNotFoundError):
            raise missing(self._address, path) from None
        except errors.AlreadyExistsError:
            raise already_there(self._address, path) from None
        except (errors.PermissionDeniedError, errors.UnauthenticatedError, errors.NotSupportedError) as error:
            raise Unreachable(f"{join(self._address, path)}: {error}", address=self._address, path=path) from error
        except (errors.BaseError, OSError) as error:
            raise Transient(str(error)) from error
