"""Is a checkpoint whole? Answered without torch, so that a command line can ask in a moment.

Two depths. A *glance* reads the manifest and compares the files' sizes: enough to list checkpoints and to decide which may
expire. To *verify* is to read every byte: enough to train from. Only committed names are looked at, and what is refused is
named.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from shoal.checkpoint import strictjson
from shoal.checkpoint.files import (
    HOSTS,
    MANIFEST,
    Beside,
    NotWhole,
    existing_file,
    folder,
    parse_beside,
    parse_step,
    read_into,
    step_name,
)
from shoal.checkpoint.manifest import MAX_BYTES, Manifest, decode
from shoal.checkpoint.shard import read_shard
from shoal.core.errors import RequestError

_MAX_HOSTS = 4 * 2**20


@dataclass(frozen=True, kw_only=True)
class Found:
    """The newest whole checkpoint of a folder, if any, and the newer ones that were passed over."""

    path: Path | None
    refused: tuple[tuple[Path, str], ...]


def read_manifest(folder_fd: int, path: Path, *, expect: str | None = None) -> Manifest:
    """The manifest inside a checkpoint's folder.

    Args:
        folder_fd: the folder.
        path: its name.
        expect: what ``hash_manifest`` must say of it, where several processes read one checkpoint; None for any.

    Raises:
        NotWhole: it is missing, too large, altered, not the expected one, or of another step than the folder's name says.
    """
    data = _read_bytes(folder_fd)
    found = hashlib.sha256(data).hexdigest()
    if expect is not None and found != expect:
        raise NotWhole(
            f"{MANIFEST} is not the one that all ranks agreed on (sha256 {found[:16]}..., agreed {expect[:16]}...): the "
            "checkpoint was replaced while it was being read; leave it alone, and start again"
        )
    manifest = decode(data)
    named = _step_of(path.name)
    if named is not None and named != manifest.step:
        raise NotWhole(f"{MANIFEST} is of step {manifest.step}, the folder of step {named}")
    return manifest


def hash_manifest(path: Path) -> str:
    """SHA-256 of a checkpoint's manifest, which has the sums of all its bytes: processes that read one together agree on it.

    Raises:
        NotWhole: there is no manifest, or it is too large.
        RequestError: there is no such folder.
    """
    with folder(path) as folder_fd:
        return hashlib.sha256(_read_bytes(folder_fd)).hexdigest()


def _read_bytes(folder_fd: int) -> bytes:
    with existing_file(folder_fd, MANIFEST) as (fd, size):
        if size > MAX_BYTES:
            raise NotWhole(f"{MANIFEST} has {size} bytes, more than {MAX_BYTES}")
        data = bytearray(size)
        read_into(fd, memoryview(data), 0, MANIFEST)
    return bytes(data)


def _step_of(name: str) -> int | None:
    beside = parse_beside(name)
    return beside.step if beside is not None else parse_step(name)


def glance(path: Path, *, parts: bool = False) -> Manifest:
    """The manifest of a checkpoint whose files are all there with the right sizes. Their bytes are not read.

    Args:
        path: its folder.
        parts: files may be missing, because other hosts have them; those that are there must be right.

    Raises:
        NotWhole: names what is wrong.
        RequestError: there is no such folder.
    """
    with folder(path) as folder_fd:
        manifest = read_manifest(folder_fd, path)
        for name, entry in manifest.files.items():
            if parts and not _is_there(folder_fd, name):
                continue
            try:
                with existing_file(folder_fd, name) as (_, size):
                    if size != entry.size:
                        raise NotWhole(f"{name} has {size} bytes, the manifest says {entry.size}")
            except NotWhole as error:
                raise NotWhole(f"{error}{_elsewhere(folder_fd, name)}") from error
    return manifest


def verify(path: Path) -> list[str]:
    """Every problem of a checkpoint, each with the file it is in; empty when every byte is as it was written.

    Raises:
        RequestError: there is no such folder.
    """
    return list(verify_files(path).problems)


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What a folder has of a checkpoint."""

    manifest: Manifest | None
    """None where that cannot be read; there is nothing else then."""
    whole: tuple[str, ...]
    """The files of which every byte is as it was written."""
    problems: tuple[str, ...]
    """What is wrong with the others, each with its name."""


def verify_files(path: Path) -> Verified:
    """Read every byte that a folder has of a checkpoint.

    Raises:
        RequestError: there is no such folder.
    """
    manifest, whole, problems = None, [], []
    try:
        with folder(path) as folder_fd:
            manifest = read_manifest(folder_fd, path)
            layouts = manifest.layouts()
            for name, entry in manifest.files.items():
                try:
                    read_shard(folder_fd, name, entry, layouts[name], wanted=frozenset(), check_all=True)
                    whole.append(name)
                except NotWhole as error:
                    problems.append(f"{error}{_elsewhere(folder_fd, name)}")
    except NotWhole as error:
        problems.append(str(error))
    return Verified(manifest=manifest, whole=tuple(whole), problems=tuple(problems))


def _is_there(folder_fd: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _elsewhere(folder_fd: int, name: str) -> str:
    """Where a file that is missing should be, as far as the folder tells; empty for one that should be here."""
    if _is_there(folder_fd, name) or not _is_there(folder_fd, HOSTS):
        return ""
    try:
        with existing_file(folder_fd, HOSTS) as (fd, size):
            data = bytearray(min(size, _MAX_HOSTS))
            read_into(fd, memoryview(data), 0, HOSTS)
        host = strictjson.parse(bytes(data))[name]
    except (NotWhole, ValueError, KeyError, TypeError, RecursionError):
        return ""
    if not isinstance(host, str) or not host.isprintable():
        return ""
    return f" here: host {host[:80]} has it; go on with that host among the run's, or copy the file from there"


def committed_names(root: Path) -> list[tuple[int, Path]]:
    """The folders of ``root`` that have a committed checkpoint's name, newest first; whole or not.

    A folder set aside by a save that died before it took the name counts as what it was, until the sweep puts it back.
    """
    found: dict[int, Path] = {}
    aside: dict[int, Path] = {}
    try:
        names = sorted(os.listdir(root))
    except (FileNotFoundError, NotADirectoryError):
        return []
    for name in names:
        step, beside = parse_step(name), parse_beside(name)
        if step is not None:
            found[step] = root / name
        elif beside is not None and beside.kind is Beside.REPLACED:
            aside[beside.step] = root / name
    return sorted((aside | found).items(), reverse=True)


def newest_whole(root: Path) -> Found:
    """The newest checkpoint of which every byte is as it was written; the newer ones that are not are named with the reason."""
    refused: list[tuple[Path, str]] = []
    for _, path in committed_names(root):
        try:
            problems = verify(path)
        except RequestError:
            # It expired between the listing and now.
            continue
        if not problems:
            return Found(path=path, refused=tuple(refused))
        refused.append((path, "; ".join(problems)))
    return Found(path=None, refused=tuple(refused))


def checkpoints_in(path: Path) -> list[Path]:
    """What a user means by a folder: the checkpoint itself, or all of a run or of its ``checkpoints`` folder, newest first.

    Raises:
        RequestError: there is no such folder, or no checkpoint in it.
    """
    resolved = path.resolve()
    if not resolved.is_dir():
        if ":/" in str(path):
            raise RequestError(
                f"{path} is an address, and this reads folders: `shoal ckpt fetch RUN` brings the newest checkpoint of a run's "
                "address into its run directory, with every sum checked"
            )
        raise RequestError(f"no such folder: {path}; give a run directory or a checkpoint such as {step_name(100)}")
    if os.path.lexists(resolved / MANIFEST) or _step_of(resolved.name) is not None:
        return [resolved]
    inside = resolved / "checkpoints"
    found = [checkpoint for _, checkpoint in committed_names(inside if inside.is_dir() else resolved)]
    if not found:
        raise RequestError(
            f"no checkpoint in {path}; give a run directory or a checkpoint such as {step_name(100)}. Where the run's "
            "checkpoint.place is an address, `shoal ckpt show ADDRESS` lists them and `shoal ckpt fetch RUN` brings the newest"
        )
    return found


def locate(path: Path) -> Path:
    """The one checkpoint that a user means by a folder: itself, or the newest whole one of a run.

    Raises:
        RequestError: there is no such folder, or no checkpoint in it.
        NotWhole: there are checkpoints and none is whole; or the given one is not.
    """
    refused = []
    for checkpoint in checkpoints_in(path):
        problems = verify(checkpoint)
        if not problems:
            return checkpoint
        refused.append(f"  {checkpoint.name}: {'; '.join(problems)}")
    listed = "\n".join(refused)
    raise NotWhole(f"no whole checkpoint in {path}:\n{listed}")
