"""A run directory as it is known so far: its events, and the small files beside them. It is followed by looking again."""

import hashlib
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from shoal.core.rundir import RunDir
from shoal.dashboard.runs.cache import ColumnCache
from shoal.dashboard.runs.curves import Curve, CurveName, Curves, curve_names
from shoal.dashboard.runs.eventfile import EventFile
from shoal.dashboard.runs.files import Refused, Unreadable, list_inside, read_small, why

_RANK_FILE = re.compile(r"rank-([0-9]{3,6})\.jsonl")
_MOST_FILES = 4096
_MOST_JSON = 40
_LEAD_SECONDS = 30.0
_REST_SECONDS = 20.0
_OWN_FILES = frozenset({"plan.json", "summary.json", "forecast.json", "live.json"})


class _SmallFile:
    """A small file that is read again when it changes."""

    def __init__(self, root: Path, path: Path) -> None:
        self._root, self.path = root, path
        self._seen: tuple[int, int, int] | None = None
        self.data: bytes | None = None
        self.changed_at = 0.0
        self.refused = ""

    def look(self) -> bool:
        """Read it where it is new; whether it was."""
        try:
            status = os.stat(self.path)
            seen = (status.st_ino, status.st_size, status.st_mtime_ns)
        except (FileNotFoundError, NotADirectoryError):
            was_there = self._seen is not None or self.refused != ""
            self._seen, self.data, self.refused = None, None, ""
            return was_there
        except OSError as error:
            return self._keep(why(error))
        if seen == self._seen:
            return False
        try:
            self.data, self.refused = read_small(self._root, self.path), ""
        except Unreadable as refused:
            return self._keep(str(refused))
        except Refused as refused:
            self.data, self.refused = None, str(refused)
        self._seen, self.changed_at = seen, status.st_mtime
        return True

    def _keep(self, refused: str) -> bool:
        """Stay with what was read before, until the system lets it be read again; whether that has to be said."""
        self._seen, was_refused, self.refused = None, self.refused, refused
        return refused != was_refused

    def values(self) -> dict[str, Any] | None:
        """What it holds as JSON; None where that is nothing, or no object."""
        if self.data is None:
            return None
        try:
            return msgspec.json.decode(self.data, type=dict[str, Any])
        except (ValueError, RecursionError) as error:
            self.refused = f"it is no JSON object: {str(error)[:100]}"
            return None


class Stillness:
    """For how long something has not changed, by this process's own clock: clocks of other machines may be hours off."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """At the last look, since the last change that was seen."""
        self.has_moved = False
        """A change was seen, not only what was there at first."""
        self._moved_at: float | None = None

    def look(self, now: float, *, has_changed: bool) -> None:
        """Take what a look has found."""
        self.has_moved |= has_changed and self._moved_at is not None
        if has_changed or self._moved_at is None:
            self._moved_at = now
        self.seconds = now - self._moved_at


class Run:
    """All that is read of one run directory.

    Args:
        path: of the run directory.
        root: what files must lie in, links followed; the run directory itself where it is left out.
        name: shown to people; the folder's name where it is left out.
        cache: of columns; None for none.
        clock: seconds that only go forward.
    """

    def __init__(
        self,
        path: Path,
        *,
        root: Path | None = None,
        name: str | None = None,
        cache: ColumnCache | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = Path(os.path.realpath(path))
        self._root = Path(os.path.realpath(root)) if root is not None else self.path
        self.name = name if name is not None else self.path.name
        self.id = hashlib.sha256(os.fsencode(self.path)).hexdigest()[:16]
        """Stands for the run in addresses."""
        self.directory = RunDir(self.path)
        self.files: dict[str, EventFile] = {}
        """Event files by name, such as ``rank-000.jsonl``."""
        self.curves = Curves()
        self.version = 0
        """Grows with every change."""
        self.plan: dict[str, Any] = {}
        """plan.json; empty where there is none."""
        self.recipe = ""
        """recipe.toml."""
        self.summary: dict[str, Any] | None = None
        """summary.json; None where there is none, or an older one than the run that goes on now."""
        self.forecast: dict[str, Any] | None = None
        """forecast.json."""
        self.live: dict[str, Any] | None = None
        """live.json, which the supervisor rewrites."""
        self.errors: dict[str, dict[str, Any]] = {}
        """What failed ranks said of themselves, by file name."""
        self.certificates: list[dict[str, Any]] = []
        """What ``shoal verify --json`` has left here, each with ``"file"``."""
        self.stillness, self.live_stillness = Stillness(), Stillness()
        """Of everything, and of live.json."""
        self._cache, self._clock = cache, clock
        self._small = {name: _SmallFile(self._root, self.path / name) for name in ("recipe.toml", *sorted(_OWN_FILES))}
        self._others: dict[str, _SmallFile] = {}
        self._listed: dict[str, tuple[int, float]] = {}
        """When each folder was listed, by what the system says of its last change."""
        self._unlisted: dict[str, str] = {}
        """Folders that could not be listed, and why."""

    # -- following ---------------------------------------------------------------------------------------------------------

    def look(self) -> Iterator[None]:
        """Read what is new. Whoever iterates may let others look at the run between two steps."""
        begin = self.version
        for name, small in self._small.items():
            has_changed = small.look()
            if has_changed:
                self._take_small(name, small)
                self.version += 1
            if name == "live.json":
                self.live_stillness.look(self._clock(), has_changed=has_changed)
        self._list_others()
        self._list_events()
        for file in self.files.values():
            before = (file.cursor.offset, file.refused, file.restarts)
            for _ in file.update():
                self.version += 1
                yield
            if (file.cursor.offset, file.refused, file.restarts) != before:
                self.version += 1
                yield
        self.stillness.look(self._clock(), has_changed=self.version != begin)

    def look_once(self) -> "Run":
        """Read what is new, all of it."""
        for _ in self.look():
            pass
        for file in self.keep():
            self.remap(file)
        return self

    def keep(self) -> Iterator[EventFile]:
        """Write down what is new of event files, where that is worth it; those which are better read from there from now on."""
        if self._cache is not None:
            # Of a run that has come to rest also the rest.
            is_last = self.stillness.seconds > _REST_SECONDS
            for file in list(self.files.values()):
                if self._cache.keep(file, is_last=is_last):
                    yield file

    def remap(self, file: EventFile) -> None:
        """Let a file's columns be pages of the cache, which the system may take back when memory is short."""
        if self._cache is not None:
            self._cache.remap(file)

    def _take_small(self, name: str, small: _SmallFile) -> None:
        if name == "recipe.toml":
            self.recipe = (small.data or b"").decode(errors="replace")
        else:
            setattr(self, name.partition(".")[0], small.values() or ({} if name == "plan.json" else None))

    def _has_changed(self, folder: Path) -> bool:
        """True when a folder was never listed, or names in it came or went; also where that may be so, just after it did."""
        try:
            status = os.stat(folder)
        except OSError:
            return False
        key = str(folder)
        known = self._listed.get(key)
        if known is not None and known[0] == status.st_mtime_ns and known[1] > status.st_mtime + 2.0:
            return False
        self._listed[key] = (status.st_mtime_ns, time.time())
        return True

    def _list_events(self) -> None:
        folder = self.directory.supervisor_events.parent
        if not self._has_changed(folder):
            return
        for name in self._names(folder, ".jsonl")[:_MOST_FILES]:
            if name not in self.files:
                match = _RANK_FILE.fullmatch(name)
                file = EventFile(self._root, folder / name, int(match[1]) if match else None)
                if self._cache is not None:
                    self._cache.load(file)
                self.files[name] = file
        self.files = dict(sorted(self.files.items()))

    def _list_others(self) -> None:
        folders = (self.path, self.directory.errors)
        changed = [self._has_changed(folder) for folder in folders]
        if any(changed):
            found = [folder / name for folder in folders for name in self._names(folder, ".json")[:_MOST_JSON]]
            found = [path for path in found if path.parent != self.path or path.name not in _OWN_FILES]
            self._others = {
                str(path): self._others.get(str(path), _SmallFile(self._root, path)) for path in found[: 2 * _MOST_JSON]
            }
        news = [small.look() for small in self._others.values()]
        if any(news) or any(changed):
            self.errors, self.certificates = {}, []
            for small in self._others.values():
                values = small.values()
                if values is None:
                    continue
                if small.path.parent == self.directory.errors:
                    self.errors[small.path.name] = values
                elif isinstance(values.get("plans"), list) and isinstance(values.get("mutants"), list):
                    self.certificates.append({**values, "file": small.path.name})
            self.version += any(news)

    def _names(self, folder: Path, ending: str) -> list[str]:
        """The names in a folder that end so; none where it cannot be listed, which is tried again at the next look."""
        key = os.path.relpath(folder, self.path)
        try:
            found = [name for name in list_inside(self._root, folder) if name.endswith(ending)]
            self.version += self._unlisted.pop(key, None) is not None
            return found
        except Unreadable as refused:
            self._listed.pop(str(folder), None)
            self.version += self._unlisted.get(key) != str(refused)
            self._unlisted[key] = str(refused)
            return []

    def names_in(self, folder: str) -> list[str]:
        """The names in a folder of the run directory, such as ``logs``; none where it cannot be listed."""
        try:
            return list_inside(self._root, self.path / folder)
        except Unreadable:
            return []

    def size_of(self, *parts: str) -> int | None:
        """Bytes of a plain file of the run directory; None where there is none, or a link that may lead anywhere."""
        try:
            status = os.lstat(self.path.joinpath(*parts))
        except OSError:
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    @property
    def root(self) -> Path:
        """What files must lie in."""
        return self._root

    # -- what is known -----------------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> list[EventFile]:
        """The event files of ranks, in order."""
        return sorted((file for file in self.files.values() if file.rank is not None), key=lambda file: file.rank or 0)

    def rank_file(self, rank: int) -> EventFile | None:
        """A rank's events; None where it has none."""
        return next((file for file in self.files.values() if file.rank == rank), None)

    def lead(self) -> EventFile | None:
        """The rank whose steps stand for the run: the first that is not behind the others."""
        with_steps = [file for file in self.ranks if file.steps.rows]
        newest = max((file.newest for file in with_steps), default=0.0)
        return next((file for file in with_steps if file.newest >= newest - _LEAD_SECONDS), None)

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """Kept events of these kinds, or of all but steps and spans, of all files, each with ``"source"``: by time."""
        found = []
        for name, file in self.files.items():
            source = name.removesuffix(".jsonl")
            found += [{**event, "rank": file.rank, "source": source} for event in file.events(*kinds)]
        return sorted(found, key=lambda event: float(event["t"]))

    def curve_names(self) -> list[CurveName]:
        """The curves that there are."""
        workers = [file for file in self.ranks if "work" in file.tables]
        files = {file.rank: file for file in (*workers[:1], self.lead(), *self.ranks[:1]) if file is not None}
        found: dict[str, CurveName] = {}
        for file in files.values():
            found.update({curve.name: curve for curve in curve_names(file)})
        return list(found.values())

    def curve(self, name: str, rank: int | None = None) -> Curve | None:
        """A curve of a rank, or of the run; None where there is none of this name."""
        if rank is not None:
            file = self.rank_file(rank)
            return None if file is None else self.curves.get(file, name)
        for file in (self.lead(), *self.ranks):
            if file is not None and (found := self.curves.get(file, name)) is not None:
                return found
        return None

    @property
    def newest(self) -> float:
        """The time of the newest event; 0 where there is none."""
        return max((file.newest for file in self.files.values()), default=0.0)

    @property
    def live_changed_at(self) -> float:
        """When live.json was written last, by the file system's clock."""
        return self._small["live.json"].changed_at

    @property
    def summary_changed_at(self) -> float:
        """When summary.json was written last, by the file system's clock."""
        return self._small["summary.json"].changed_at

    @property
    def broken_lines(self) -> int:
        """Lines of event files that are no events."""
        return sum(file.broken for file in self.files.values())

    @property
    def long_lines(self) -> int:
        """Lines that were skipped for their length."""
        return sum(file.cursor.oversized for file in self.files.values())

    @property
    def unknown_kinds(self) -> dict[str, int]:
        """Events of kinds that this version does not know."""
        found: dict[str, int] = {}
        for file in self.files.values():
            for kind, count in file.unknown.items():
                found[kind] = found.get(kind, 0) + count
        return found

    @property
    def skipped(self) -> dict[str, str]:
        """Files that are not read, and why."""
        small = [*self._small.values(), *self._others.values()]
        found = {"the run directory" if name == "." else name: reason for name, reason in self._unlisted.items()}
        found |= {f"events/{name}": file.refused for name, file in self.files.items() if file.refused}
        found |= {os.path.relpath(one.path, self.path): one.refused for one in small if one.refused}
        return found
