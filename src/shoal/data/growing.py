"""Data that grows while a run trains on it: versions, of which an epoch reads one.

A version only adds samples behind those that are there, so a sample keeps its number for ever. Where the data is, is then
{version, epoch, offset}: an epoch reads the version that was the newest when the epoch began, all ranks the same one, and a run
that goes on in the middle of an epoch goes on with that version, whatever was appended since.
"""

from typing import Any, Protocol, runtime_checkable

from shoal.data.source import Source


@runtime_checkable
class Growing(Source, Protocol):
    """A source that newer versions add samples to."""

    @property
    def version(self) -> int:
        """That is read."""

    def newest_version(self) -> int:
        """That there is; what this process sees of it, which others may see later."""

    def grow(self, version: int) -> None:
        """Read this version from now on, which is not older than that of the start. What is held out stays as it
        is: everything that was added is trained on.

        Raises:
            RequestError: there is no such version.
            RunError: it has other columns, or samples that the model has no place for.
        """


def growing(source: Any) -> Growing | None:
    """A source as one that grows, where the recipe says that the run follows it (``data.follow``); else None."""
    return source if isinstance(source, Growing) and getattr(source, "follows", False) else None
