"""Checkpoints at an address of ``fsspec``: an object store, or anything else that it has a file system for.

A store has neither renames nor fsync that could be relied on, so the commit is the manifest: every rank uploads its shard into a
folder of this save's own, ``step-N-<id>``, rank 0 checks that all of them are there with their sizes, and writes the manifest
last. A folder without one is no checkpoint, whatever else it has; one whose manifest is torn is refused by its sum, and one
whose shards are is refused when it is loaded, because every leader downloads all files and checks every sum before anybody
reads. How durable an upload is, is the store's affair.

``torch.distributed.checkpoint`` writes to ``fsspec`` too, with pickled metadata that is renamed into place, and no sums.
"""

import contextlib
import hashlib
import os
import re
import secrets
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.checkpoint.commit import Draft, describe_part, encode_checked, remove, sweep
from shoal.checkpoint.files import (
    GOOD,
    MANIFEST,
    Beside,
    NotWhole,
    beside_name,
    new_file,
    parse_step,
    shard_name,
    step_name,
)
from shoal.checkpoint.holdings import Cut
from shoal.checkpoint.manifest import MAX_BYTES, Manifest, Part, decode
from shoal.checkpoint.retention import Fallback, expired
from shoal.checkpoint.shard import Blob, FileEntry, check_chunk, stream_shard
from shoal.core.errors import RequestError

_FOLDER = re.compile(r"(step-[0-9]{8,18})-([0-9a-f]{16})", re.ASCII)
_ASIDE = "aside"


def check_address(address: str, num_processes: int) -> None:
    """Refuse an address that this installation cannot reach, before a process starts. Nothing is asked of the store itself.

    Raises:
        RequestError: says what is missing.
    """
    # Only where an address is asked for: importing it takes a moment.
    import fsspec

    protocol = address.partition("://")[0].partition("::")[0]
    try:
        fsspec.get_filesystem_class(protocol)
    except ValueError:
        raise RequestError(
            f"checkpoint.place {address!r}: fsspec knows no {protocol!r}; use an address such as s3://bucket/run, or "
            "auto, shared, first or hosts"
        ) from None
    except ImportError as error:
        raise RequestError(f"checkpoint.place {address!r} needs a package that is not installed: {error}") from None
    where = address.partition("://")[2]
    if protocol in ("file", "local") and not where.startswith("/"):
        raise RequestError(
            f"checkpoint.place {address!r} names no folder from the root on: write file:///folder, which every rank sees alike"
        )
    if not where.strip("/"):
        raise RequestError(
            f"checkpoint.place {address!r} has nothing behind {protocol}://; name a place there, such as {protocol}://bucket/run"
        )
    if protocol == "memory" and num_processes > 1:
        raise RequestError(
            f"checkpoint.place {address!r} is the memory of one process, and the run has {num_processes}; use an address that "
            "all of them reach"
        )


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A folder at an address that has a manifest."""

    step: int
    id: str
    folder: str
    names: frozenset[str]

    @property
    def is_aside(self) -> bool:
        """True when nobody should go on from it."""
        return _ASIDE in self.names


class ObjectStore:
    """The files under one address. Everything that goes wrong there is an ``OSError``.

    Raises:
        OSError: it cannot be reached.
    """

    def __init__(self, address: str) -> None:
        # Only where an address is asked for: importing it takes a moment.
        import fsspec

        self.address = address.rstrip("/")
        with self._asking("opening it"):
            self._files, base = fsspec.core.url_to_fs(self.address)
        self._base = str(base).rstrip("/")

    @contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, NotWhole):
            raise
        except Exception as error:
            # Whatever library speaks to the store raises what it likes; to a save or a load all of it is the store's refusal.
            raise OSError(f"{self.address}: {what}: {type(error).__name__}: {error}") from error

    def path(self, *names: str) -> str:
        """Of a file, as the store names it."""
        return "/".join((self._base, *names))

    def make_folder(self, name: str) -> None:
        """Make a folder, where the store has folders."""
        with self._asking(f"making {name}"):
            self._files.makedirs(self.path(name) if name else self._base, exist_ok=True)

    def put(self, data: bytes, *names: str) -> None:
        """Write a small file at once."""
        with self._asking(f"writing {names[-1]}"):
            self._files.pipe_file(self.path(*names), data)

    def size(self, *names: str) -> int | None:
        """Bytes of a file; None where there is none."""
        with self._asking(f"looking at {names[-1]}"):
            self._files.invalidate_cache()
            try:
                return int(self._files.info(self.path(*names))["size"])
            except FileNotFoundError:
                return None

    def read(self, most: int, *names: str) -> bytes:
        """A small file.

        Raises:
            NotWhole: it is missing, or larger than ``most``.
        """
        size = self.size(*names)
        if size is None or size > most:
            raise NotWhole(f"{names[-1]} " + ("is missing" if size is None else f"has {size} bytes, more than {most}"))
        with self._asking(f"reading {names[-1]}"):
            return bytes(self._files.cat_file(self.path(*names)))

    @contextmanager
    def opened(self, mode: str, *names: str) -> Iterator[Any]:
        """A file to read or write piece by piece."""
        with (
            self._asking(f"{'writing' if 'w' in mode else 'reading'} {names[-1]}"),
            self._files.open(self.path(*names), mode) as file,
        ):
            yield file

    def names(self, name: str = "") -> list[str]:
        """The names in a folder; none where there is no such folder."""
        with self._asking(f"listing {name or 'it'}"):
            self._files.invalidate_cache()
            try:
                found = self._files.ls(self.path(name) if name else self._base, detail=False)
            except FileNotFoundError:
                return []
            return sorted({str(path).rstrip("/").rpartition("/")[2] for path in found})

    def remove(self, *names: str) -> None:
        """Delete a file, or a folder with all that is in it; nothing where it is gone."""
        with self._asking(f"deleting {names[-1]}"), contextlib.suppress(FileNotFoundError):
            self._files.rm(self.path(*names), recursive=True)

    def checkpoints(self) -> list[Stored]:
        """The folders that have a manifest, newest step first; of one step, the newest save first."""
        found = []
        for name in self.names():
            if (parsed := parse_folder(name)) is not None:
                names = frozenset(self.names(name))
                if MANIFEST in names:
                    found.append(Stored(step=parsed[0], id=parsed[1], folder=name, names=names))
        return sorted(found, key=lambda one: (one.step, one.id), reverse=True)

    def leftovers(self) -> list[str]:
        """Folders of saves that died before their manifest."""
        return [name for name in self.names() if parse_folder(name) is not None and MANIFEST not in self.names(name)]


def parse_folder(name: str) -> tuple[int, str] | None:
    """Step and id of a checkpoint's folder at an address; None for any other name."""
    match = _FOLDER.fullmatch(name)
    step = parse_step(match[1]) if match is not None else None
    return None if match is None or step is None else (step, match[2])


def next_id(taken: Iterable[str], now: float) -> str:
    """An id that comes after those taken, by the clock: of two whole checkpoints of one step the later one is the newer."""
    by_clock = int(now * 1000) << 20 | secrets.randbits(20)
    return f"{max([by_clock, *(int(id, 16) + 1 for id in taken)]) % 2**64:016x}"


def begin_at(store: ObjectStore, root: Path, step: int) -> Draft:
    """Make the folder of a save."""
    taken = [parsed[1] for name in store.names() if (parsed := parse_folder(name)) is not None and parsed[0] == step]
    draft = Draft(root=root, step=step, id=next_id(taken, time.time()))
    store.make_folder(folder_of(draft))
    return draft


def folder_of(draft: Draft) -> str:
    """Its name at an address."""
    return f"{step_name(draft.step)}-{draft.id}"


def upload(store: ObjectStore, draft: Draft, rank: int, blobs: Mapping[str, Blob], cuts: Iterable[Cut]) -> Part:
    """Write one rank's shard, straight from memory."""
    file = shard_name(rank)
    with store.opened("wb", folder_of(draft), file) as out:

        def put(chunk: Sequence[memoryview]) -> None:
            for piece in chunk:
                out.write(piece)

        entry = stream_shard(put, blobs)
    return describe_part(file, entry, blobs, cuts)


def commit_at(store: ObjectStore, draft: Draft, manifest: Manifest) -> None:
    """Write the manifest, when all files are there; then older saves of this step go.

    Raises:
        OSError: the store refused.
        NotWhole: a file is not there as it was written.
        ValueError: a value is not JSON, or there is too much of them.
    """
    data = encode_checked(manifest)
    for name, entry in manifest.files.items():
        size = store.size(folder_of(draft), name)
        if size != entry.size:
            raise NotWhole(f"{name} has {size} bytes at {store.address}, and {entry.size} were written")
    store.put(data, folder_of(draft), MANIFEST)
    # It is committed: a store that refuses a deletion now leaves an older save of this step, over which the newer one is chosen.
    with contextlib.suppress(OSError):
        for other in store.checkpoints():
            if other.step == draft.step and other.id < draft.id:
                delete(store, other.folder)


def delete(store: ObjectStore, name: str) -> None:
    """Delete a checkpoint, its manifest first: what is left of a deletion cut short is no checkpoint."""
    store.remove(name, MANIFEST)
    store.remove(name)


def download(store: ObjectStore, name: str, root: Path) -> tuple[Path, str]:
    """Bring a whole checkpoint into a folder beside the committed ones, every sum checked; the folder, and its manifest's hash.

    Raises:
        NotWhole: names what does not agree; the folder is gone again.
        OSError: the store or the disk refused; as well.
    """
    data, manifest = _read_manifest(store, name)
    copy = root / beside_name(Beside.BROUGHT, manifest.step, manifest.id)
    try:
        root.mkdir(exist_ok=True)
        remove(copy)
        copy.mkdir()
        for file, entry in manifest.files.items():
            _check_size(store, name, file, entry)
            with store.opened("rb", name, file) as source, new_file(copy / file) as fd:
                for start, expected in zip(range(0, entry.size, entry.chunk_bytes), entry.sums, strict=True):
                    chunk = memoryview(_read(source, min(entry.chunk_bytes, entry.size - start), file))
                    check_chunk(chunk, start, expected, f"{file} from {store.address}")
                    while chunk:
                        chunk = chunk[os.write(fd, chunk) :]
        with new_file(copy / MANIFEST) as fd:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
    except (OSError, NotWhole):
        remove(copy)
        raise
    return copy, hashlib.sha256(data).hexdigest()


def glance_at(store: ObjectStore, name: str) -> Manifest:
    """The manifest of a checkpoint whose files are all there with the right sizes. Their bytes are not read.

    Raises:
        NotWhole: names what is wrong.
        OSError: the store refused.
    """
    _, manifest = _read_manifest(store, name)
    for file, entry in manifest.files.items():
        _check_size(store, name, file, entry)
    return manifest


def _check_size(store: ObjectStore, name: str, file: str, entry: FileEntry) -> None:
    size = store.size(name, file)
    if size is None:
        raise NotWhole(f"{file} is missing")
    if size != entry.size:
        raise NotWhole(f"{file} has {size} bytes, the manifest says {entry.size}")


def _read_manifest(store: ObjectStore, name: str) -> tuple[bytes, Manifest]:
    data = store.read(MAX_BYTES, name, MANIFEST)
    manifest = decode(data)
    if (manifest.step, manifest.id) != parse_folder(name):
        raise NotWhole(f"{MANIFEST} is of step {manifest.step} and id {manifest.id}, the folder is {name}")
    return data, manifest


def fetch_newest(store: ObjectStore, root: Path) -> tuple[Path, list[tuple[str, str]]]:
    """Bring the newest whole checkpoint of an address into a folder of checkpoints, to stay there; and those passed over.

    Raises:
        NotWhole: there is none, or none is whole; names what is wrong with each.
        OSError: the store or the disk refused.
    """
    refused: list[tuple[str, str]] = []
    for one in store.checkpoints():
        if one.is_aside:
            continue
        try:
            copy, _ = download(store, one.folder, root)
        except NotWhole as error:
            refused.append((one.folder, str(error)))
            continue
        final = root / step_name(one.step)
        if os.path.lexists(final):
            remove(final)
        os.rename(copy, final)
        return final, refused
    said = "; ".join(f"{name}: {reason}" for name, reason in refused) or "none was written"
    raise NotWhole(f"no whole checkpoint at {store.address} ({said})")


def _read(source: Any, length: int, name: str) -> bytes:
    pieces = []
    while length:
        piece = source.read(length)
        if not piece:
            raise NotWhole(f"{name} ends {length} bytes before its end")
        pieces.append(piece)
        length -= len(piece)
    return b"".join(pieces)


def expire_at(store: ObjectStore, *, newest: int, keep: int, keep_every: int | None, stays: Collection[int]) -> None:
    """Delete what has expired, as ``retention.expired`` decides."""
    stored = [one for one in store.checkpoints() if not one.is_aside]
    if newest not in {one.step for one in stored}:
        return
    gone = set(expired([one.step for one in stored], newest=newest, keep=keep, keep_every=keep_every, stays=stays))
    for one in stored:
        if one.step in gone:
            delete(store, one.folder)


def mark_good_at(store: ObjectStore, step: int) -> None:
    """Say that a step was taken from this checkpoint."""
    for one in store.checkpoints():
        if one.step == step and GOOD not in one.names:
            store.put(b"a step was taken from here\n", one.folder, GOOD)


def fall_back_at(store: ObjectStore, good: int | None) -> Fallback:
    """Mark what is newer than the good checkpoint, so that nobody goes on from it; it stays, for those who look for the cause."""
    stored = [one for one in store.checkpoints() if not one.is_aside]
    found = good if good in {one.step for one in stored} else None
    newer = [one for one in stored if found is not None and one.step > found]
    for one in newer:
        store.put(b"no step was taken from here\n", one.folder, _ASIDE)
    left = [one.step for one in stored if one not in newer]
    steps = [one.step for one in newer]
    return Fallback(
        good=found,
        newest=max(left, default=None),
        first_aside=min(steps, default=None),
        last_aside=max(steps, default=None),
    )


def clear_up(store: ObjectStore, root: Path, *, is_first: bool, is_leader: bool) -> None:
    """Remove what dead saves and loads have left at the address and in the run directory."""
    if is_first:
        for name in store.leftovers():
            store.remove(name)
    if is_leader:
        sweep(root)
