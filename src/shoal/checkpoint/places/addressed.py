"""The place of a run whose checkpoints go to an address: who of the ranks does what of ``address.py``."""

import json
import secrets
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from shoal.checkpoint.commit import Draft, remove
from shoal.checkpoint.files import GOOD, Beside, NotWhole, beside_name
from shoal.checkpoint.holdings import Cut
from shoal.checkpoint.manifest import Part
from shoal.checkpoint.places.address import (
    ObjectStore,
    begin_at,
    clear_up,
    commit_at,
    delete,
    download,
    expire_at,
    fall_back_at,
    folder_of,
    mark_good_at,
    parse_folder,
    upload,
)
from shoal.checkpoint.places.folders import Folders, describe_ranks
from shoal.checkpoint.places.storage import Brought, Proposal, told
from shoal.checkpoint.retention import Fallback
from shoal.checkpoint.shard import Blob
from shoal.checkpoint.strictjson import parse
from shoal.checkpoint.vote import Phase, Vote, Votes
from shoal.comm.world import World
from shoal.core.clock import Deadline
from shoal.core.errors import RunError


class AtAddress:
    """Checkpoints at an address. Every rank uploads its shard, rank 0 the manifest; every folder's leader downloads.

    Args:
        address: of ``fsspec``.
        root: this rank's own folder of checkpoints, in which downloads are put together.
        folders: who shares one.
        world: the ranks.

    Raises:
        RunError: some rank cannot write there, or does not see what another wrote; names it.
    """

    def __init__(self, address: str, root: Path, folders: Folders, *, world: World) -> None:
        self.root = root
        self.keeps = folders.rank == 0
        self._folders = folders
        vote = Vote(world.save_group, rank=world.rank, world_size=world.size)
        self._store = self._reach(address, vote, world.deadline_seconds)
        problem, is_empty = None, True
        try:
            clear_up(self._store, root, is_first=self.keeps, is_leader=folders.is_leader)
            is_empty = not self._store.checkpoints() if self.keeps else True
        except OSError as error:
            problem = str(error)
        texts = vote.exchange(
            0, Phase.LEFT, Deadline(seconds=world.deadline_seconds), problem=problem, text=b"" if is_empty else b"some"
        )
        self.is_empty = not any(texts)

    def _reach(self, address: str, vote: Vote, seconds: float) -> ObjectStore:
        """Try before step 0 what a save will do: every rank writes a file, and rank 0 has to see all of them."""
        name, problem, store = f".seen-{secrets.token_hex(8)}", None, None
        try:
            store = ObjectStore(address)
            store.make_folder("")
            store.put(b"seen\n", name)
        except OSError as error:
            problem = f"cannot write to {address} from host {self._folders.hosts[vote.rank]}: {error}"
        try:
            deadline = Deadline(seconds=seconds)
            texts = vote.exchange(0, Phase.FOLDERS, deadline, problem=problem, text=json.dumps(name).encode())
            assert store is not None, "a rank without a store votes no"
            unseen = []
            if vote.rank == 0:
                there = set(store.names())
                unseen = [rank for rank, text in enumerate(texts) if parse(text) not in there]
            if unseen:
                hosts = ", ".join(sorted({self._folders.hosts[rank] for rank in unseen}))
                problem = (
                    f"does not see at {address} what {describe_ranks(unseen)} ({hosts}) wrote there: it is another place on "
                    'each host; use an address that means the same everywhere, or checkpoint.place = "first"'
                )
            vote.exchange(0, Phase.FOLDERS, deadline, problem=problem)
        finally:
            if store is not None:
                store.remove(name)
        return store

    @property
    def where(self) -> str:
        """The address."""
        return self._store.address

    def begin(self, step: int) -> Draft:
        """Make the folder of the save."""
        return begin_at(self._store, self.root, step)

    def join(self, draft: Draft) -> None:
        """There is nothing to make."""

    def write(self, draft: Draft, rank: int, blobs: Mapping[str, Blob], cuts: Iterable[Cut]) -> Part:
        """Upload this rank's shard."""
        return upload(self._store, draft, rank, blobs, cuts)

    def finish(self, draft: Draft, proposal: Proposal, vote: Votes) -> None:
        """Rank 0 uploads the manifest."""
        problem = told(lambda: commit_at(self._store, draft, proposal.manifest())) if vote.rank == 0 else None
        vote.exchange(draft.step, Phase.COMMIT, proposal.deadline, problem=problem)

    def is_committed(self, draft: Draft) -> bool:
        """The store decides."""
        try:
            return any(one.folder == folder_of(draft) for one in self._store.checkpoints())
        except OSError:
            return False

    def name_of(self, draft: Draft) -> str:
        """Its address."""
        return f"{self.where}/{folder_of(draft)}"

    def abandon(self, draft: Draft, *, is_lost: bool) -> None:
        """Rank 0 deletes the folder; what it cannot delete has no manifest, and goes at the next start."""
        if self.keeps:
            try:
                delete(self._store, folder_of(draft))
            except OSError:
                return

    def mark_good(self, step: int) -> None:
        """By a file beside the manifest."""
        mark_good_at(self._store, step)

    def expire(self, *, newest: int, keep: int, keep_every: int | None, stays: Collection[int]) -> None:
        """Delete what has expired."""
        expire_at(self._store, newest=newest, keep=keep, keep_every=keep_every, stays=stays)

    def newest_good(self, until: int) -> int | None:
        """The newest that is marked, up to a step."""
        found = [one.step for one in self._store.checkpoints() if not one.is_aside and GOOD in one.names]
        return max((step for step in found if step <= until), default=None)

    def fall_back(self, good: int | None) -> Fallback:
        """Mark what is newer."""
        return fall_back_at(self._store, good)

    def follow_back(self, good: int | None) -> None:
        """There is one address."""

    def bring(self, world: World, step: int | None) -> Brought:
        """Rank 0 lists what there is; the leaders download the newest, and go on to the next where one of them cannot."""
        vote = Vote(world.save_group, rank=world.rank, world_size=world.size)
        names, aside = self._hear_names(vote, world.deadline_seconds, step)
        refused: list[tuple[str, str]] = []
        for name in names:
            parsed = parse_folder(name)
            if parsed is None:
                continue
            digest, problem = "", ""
            if self._folders.is_leader:
                try:
                    _, digest = download(self._store, name, self.root)
                except (OSError, NotWhole) as error:
                    problem = f"{error} (on {self._folders.hosts[world.rank]})"
            told = json.dumps([digest, problem[:500]]).encode() if self._folders.is_leader else b""
            texts = vote.exchange(parsed[0], Phase.BRING, Deadline(seconds=world.deadline_seconds), text=told)
            answers = [parse(text) for text in texts if text]
            copy = self.root / beside_name(Beside.BROUGHT, *parsed)
            agreed = str(answers[0][0])
            if all(digest == agreed and not problem for digest, problem in answers):
                where = f"{self.where}/{name}"
                return Brought(
                    path=copy, manifest=agreed, name=where, step=parsed[0], refused=tuple(refused), is_copy=True
                )
            if self._folders.is_leader:
                remove(copy)
            refused.append((name, next((str(said) for _, said in answers if said), "hosts see different manifests")))
        only_aside = f"{self.where} has only what was set aside after a value that was not finite: {', '.join(aside)}"
        return Brought(
            path=None, refused=tuple(refused), only_aside=only_aside if aside and not names and step is None else ""
        )

    def _hear_names(self, vote: Vote, seconds: float, step: int | None) -> tuple[list[str], list[str]]:
        """What rank 0 finds at the address: folders to try, newest first, and those that were set aside."""
        problem, text = None, b""
        if vote.rank == 0:
            try:
                stored = self._store.checkpoints()
                names = [one.folder for one in stored if not one.is_aside and step in (None, one.step)]
                text = json.dumps([names, [one.folder for one in stored if one.is_aside]]).encode()
            except OSError as error:
                problem = f"cannot list {self.where}: {error}"
        try:
            names, aside = parse(
                vote.exchange(0, Phase.OFFER, Deadline(seconds=seconds), problem=problem, text=text)[0]
            )
        except ValueError as error:
            raise RunError(f"rank 0 told of no names: {error}") from error
        return [str(name) for name in names], [str(name) for name in aside]

    def give_back(self, brought: Brought) -> None:
        """Remove what was downloaded."""
        if brought.path is not None and self._folders.is_leader:
            remove(brought.path)
