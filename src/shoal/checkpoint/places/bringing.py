"""Loading from folders of hosts: what each of them has is told to all, and what one lacks is brought there.

All ranks see the same answers and so make the same choice: the newest step whose files are all somewhere, whole to the byte. A
folder that has all of them is read as it is. In any other the leader puts a copy together beside the committed ones, of hard
links to what is there and of what others send, which is removed when all have loaded. A kill leaves it to the sweep.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shoal.checkpoint.commit import remove
from shoal.checkpoint.files import MANIFEST, Beside, NotWhole, beside_name, is_id, is_shard_name, new_file, step_name
from shoal.checkpoint.manifest import decode
from shoal.checkpoint.places.carry import Peer, fetch_file, receive_bytes, send_bytes, serve_file
from shoal.checkpoint.places.folders import Folders
from shoal.checkpoint.places.storage import Brought
from shoal.checkpoint.retention import describe_aside, list_aside
from shoal.checkpoint.strictjson import parse
from shoal.checkpoint.vote import Phase, Vote
from shoal.checkpoint.whole import committed_names, hash_manifest, verify_files
from shoal.core.clock import Deadline
from shoal.core.errors import RequestError, RunError


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one folder has of a checkpoint."""

    id: str
    files: tuple[str, ...]
    """All that the checkpoint has."""
    whole: tuple[str, ...]
    """Those that are here, to the byte."""
    problems: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """As text for the others."""
        return json.dumps([self.id, self.files, self.whole, [problem[:200] for problem in self.problems[:20]]]).encode()


def decode_share(text: bytes) -> Share | None:
    """What another folder has; None when it has nothing.

    Raises:
        RunError: it is no such text.
    """
    if not text:
        return None
    id, files, whole, problems = parse(text)
    if not is_id(id) or not all(is_shard_name(name) for name in files) or not set(whole) <= set(files):
        raise RunError("a rank told of files that no checkpoint has")
    return Share(id=id, files=tuple(files), whole=tuple(whole), problems=tuple(map(str, problems)))


def owners_of(shares: Mapping[int, Share | None]) -> tuple[dict[str, int], list[str]]:
    """Who gives each file, by name, and the files that nobody has; ``shares`` are by leader."""
    known = [share for share in shares.values() if share is not None]
    wanted = sorted({name for share in known for name in share.files})
    owners = {
        name: min(leader for leader, share in shares.items() if share is not None and name in share.whole)
        for name in wanted
        if any(name in share.whole for share in known)
    }
    return owners, [name for name in wanted if name not in owners]


def candidates_of(offers: Mapping[int, Mapping[int, str]]) -> list[tuple[int, str]]:
    """Steps and manifests to try, newest first; of two manifests of one step, the one that more folders have."""
    count: dict[tuple[int, str], int] = {}
    for offered in offers.values():
        for step, digest in offered.items():
            count[step, digest] = count.get((step, digest), 0) + 1
    return sorted(count, key=lambda one: (-one[0], -count[one], one[1]))


class Bringing:
    """One load.

    Args:
        root: this rank's folder of checkpoints.
        folders: who shares one.
        group: of all ranks, used by nobody else meanwhile.
        vote: over it.
        seconds: how long to wait for another rank.
    """

    def __init__(self, root: Path, folders: Folders, group: dist.ProcessGroup, vote: Vote, seconds: float) -> None:
        self._root, self._folders, self._group, self._vote, self._seconds = root, folders, group, vote, seconds

    def bring(self, step: int | None) -> Brought:
        """The newest checkpoint that the folders have together, or that of a step.

        Raises:
            RunError: a rank could not write what it was sent, or went away.
        """
        paths = dict(committed_names(self._root)) if self._folders.is_leader else {}
        offers, refused, aside = self._hear_offers(paths)
        for candidate, digest in candidates_of(offers):
            if step is not None and candidate != step:
                continue
            path = paths.get(candidate)
            has_it = path is not None and offers.get(self._folders.rank, {}).get(candidate) == digest
            shares = self._hear_shares(path if has_it else None, candidate)
            owners, missing = owners_of(shares)
            if missing or not owners:
                refused.append((step_name(candidate), self._describe_missing(missing, shares)))
                continue
            return self._put_together(candidate, digest, path if has_it else None, shares, owners, tuple(refused))
        only_aside = aside if step is None and not offers_any(offers) else ""
        return Brought(path=None, refused=tuple(refused), only_aside=only_aside)

    def _hear_offers(self, paths: Mapping[int, Path]) -> tuple[dict[int, dict[int, str]], list[tuple[str, str]], str]:
        """The manifests that each folder has, those that cannot be read, and what is said where all were set aside."""
        own: dict[int, str] = {}
        refused: list[tuple[str, str]] = []
        for known, path in paths.items():
            try:
                own[known] = hash_manifest(path)
            except (NotWhole, RequestError) as error:
                refused.append((path.name, str(error)[:200]))
        aside = list_aside(self._root) if self._folders.is_leader else []
        told = [list(own.items()), refused[:20], describe_aside(self._root, aside) if aside else ""]
        texts = self._vote.exchange(
            0, Phase.OFFER, Deadline(seconds=self._seconds), text=json.dumps(told).encode() if paths or aside else b""
        )
        offers: dict[int, dict[int, str]] = {}
        heard: list[tuple[str, str]] = []
        said = ""
        for rank, text in enumerate(texts):
            if text:
                items, others, theirs = parse(text)
                offers[rank] = {int(known): str(digest) for known, digest in items}
                heard += [(str(name), f"{reason} (on {self._folders.hosts[rank]})") for name, reason in others]
                said = said or str(theirs)
        return offers, heard, said

    def _hear_shares(self, path: Path | None, step: int) -> dict[int, Share | None]:
        own = b""
        if path is not None:
            found = verify_files(path)
            if found.manifest is not None:
                files = tuple(found.manifest.files)
                own = Share(id=found.manifest.id, files=files, whole=found.whole, problems=found.problems).encode()
        texts = self._vote.exchange(step, Phase.BRING, Deadline(seconds=self._seconds), text=own)
        return {leader: decode_share(texts[leader]) for leader in self._folders.all_leaders}

    def _describe_missing(self, missing: list[str], shares: Mapping[int, Share | None]) -> str:
        if not missing:
            return "no folder can read its manifest"
        said = []
        for leader, share in shares.items():
            found = "nothing of it" if share is None else "; ".join(share.problems) or "all that it says"
            said.append(f"{self._folders.hosts[leader]}: {found}")
        return f"no host has {', '.join(missing[:5])}{' and others' if len(missing) > 5 else ''} ({' | '.join(said)})"

    def _put_together(
        self,
        step: int,
        digest: str,
        path: Path | None,
        shares: Mapping[int, Share | None],
        owners: Mapping[str, int],
        refused: tuple[tuple[str, str], ...],
    ) -> Brought:
        known = next(share for share in shares.values() if share is not None)
        lacks = {
            leader: [name for name in owners if share is None or name not in share.whole]
            for leader, share in shares.items()
        }
        name = f"{self._root / step_name(step)}"
        if not any(lacks.values()):
            final = self._root / step_name(step)
            return Brought(path=final, manifest=digest, name=name, step=step, refused=refused)
        copy = self._root / beside_name(Beside.BROUGHT, step, known.id)
        problem = None
        if self._folders.is_leader:
            problem = self._exchange(copy, path, digest, shares, lacks, owners, step)
        try:
            # Nobody reads before its leader has everything.
            self._vote.exchange(step, Phase.BRING, Deadline(seconds=self._seconds), problem=problem)
        except RunError as error:
            if self._folders.is_leader:
                remove(copy)
            raise RunError(f"cannot bring {step_name(step)} to all hosts: {error}") from error
        is_copy = bool(lacks[self._folders.leader])
        own = copy if is_copy else self._root / step_name(step)
        return Brought(path=own, manifest=digest, name=name, step=step, refused=refused, is_copy=is_copy)

    def _exchange(
        self,
        copy: Path,
        path: Path | None,
        digest: str,
        shares: Mapping[int, Share | None],
        lacks: Mapping[int, list[str]],
        owners: Mapping[str, int],
        step: int,
    ) -> str | None:
        """Send and receive in one order that all leaders know: what went wrong here, or None."""
        me = self._folders.rank
        giver = next(leader for leader, share in shares.items() if share is not None)
        manifest, problem = None, None
        if lacks[me]:
            problem = _begin_copy(copy, path, shares[me])
        for leader in self._folders.all_leaders:
            if not lacks[leader] or leader == giver:
                continue
            if me == giver:
                send_bytes(self._peer(leader, step), _manifest_of(path))
            elif me == leader:
                try:
                    manifest = receive_bytes(self._peer(giver, step), digest)
                except NotWhole as error:
                    problem = problem or str(error)
        if lacks[me]:
            manifest = _manifest_of(path) if me == giver else manifest
            problem = problem or _write_manifest(copy, manifest, digest)
        entries = decode(manifest).files if problem is None and manifest is not None else {}
        for name, owner in owners.items():
            for leader in self._folders.all_leaders:
                if name not in lacks[leader]:
                    continue
                if me == owner and path is not None:
                    serve_file(self._peer(leader, step), path, name)
                elif me == leader and problem is None:
                    problem = fetch_file(self._peer(owner, step), copy, name, entries[name])
                elif me == leader:
                    self._peer(owner, step).end()
        return problem

    def _peer(self, peer: int, step: int) -> Peer:
        where = f"rank {self._folders.rank}, step {step}, bringing a checkpoint"
        return Peer(self._group, peer, deadline=Deadline(seconds=self._seconds), where=where)


def offers_any(offers: Mapping[int, Mapping[int, Any]]) -> bool:
    """True when some folder has a committed name."""
    return any(offers.values())


def _begin_copy(copy: Path, path: Path | None, share: Share | None) -> str | None:
    """The folder of the copy, with hard links to what is here; why there is none."""
    try:
        copy.parent.mkdir(exist_ok=True)
        remove(copy)
        copy.mkdir()
        for name in share.whole if path is not None and share is not None else ():
            assert path is not None
            try:
                os.link(path / name, copy / name, follow_symlinks=False)
            except OSError:
                # Some file systems have no hard links.
                shutil.copyfile(path / name, copy / name, follow_symlinks=False)
    except OSError as error:
        return f"cannot make {copy}: {error.strerror}"
    return None


def _manifest_of(path: Path | None) -> bytes:
    """Its bytes; none where it has gone, which whoever gets them sees by their sum."""
    try:
        return (path / MANIFEST).read_bytes() if path is not None else b""
    except OSError:
        return b""


def _write_manifest(copy: Path, data: bytes | None, digest: str) -> str | None:
    if data is None or hashlib.sha256(data).hexdigest() != digest:
        return f"{MANIFEST} is not the one that was agreed on"
    try:
        with new_file(copy / MANIFEST) as fd:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
    except OSError as error:
        return f"cannot write {MANIFEST}: {error.strerror}"
    return None
