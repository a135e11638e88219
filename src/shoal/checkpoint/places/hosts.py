"""Folders of hosts that share none: checkpoints are gathered to the first host, or each host keeps its part.

``first``: every rank writes its shard into a draft in its own folder, and after the vote on that rank 0 fetches those of the
others, checks their sums, and commits as if all had written there. The other folders keep nothing.

``hosts``: every folder's leader writes the whole manifest beside its own shards, all vote that they have, and only then the first
takes the name. So when a folder has a save under its name, every other has it too, or has all of it but the name and takes it
at the next start (``sweep``): a kill at any moment leaves the old checkpoint or the new one, over all folders together.
"""

import json
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import torch.distributed as dist

from shoal.checkpoint.commit import (
    Draft,
    abandon,
    begin,
    commit,
    drop_replaced,
    join,
    prepare,
    prepared_drafts,
    remove,
    sweep,
    take_name,
    undo,
    write_part,
)
from shoal.checkpoint.files import HOSTS, NotWhole, is_id, new_file, shard_name
from shoal.checkpoint.holdings import Cut
from shoal.checkpoint.manifest import Part
from shoal.checkpoint.places.bringing import Bringing
from shoal.checkpoint.places.carry import Peer, fetch_file, serve_file
from shoal.checkpoint.places.folders import Folders
from shoal.checkpoint.places.storage import Brought, Proposal, has_name, told
from shoal.checkpoint.retention import Fallback, expire, fall_back, mark_good, newer_than, newest_good, set_aside
from shoal.checkpoint.shard import Blob
from shoal.checkpoint.strictjson import pack, parse, unpack
from shoal.checkpoint.vote import LostTouch, Phase, SaveFailed, Vote, Votes
from shoal.checkpoint.whole import committed_names, glance
from shoal.comm.world import World
from shoal.core.clock import Deadline
from shoal.core.errors import RequestError


class HostFolders:
    """One folder per host, or per ranks that see one.

    Args:
        root: this rank's folder of checkpoints.
        folders: who shares one.
        world: the ranks.
        gathers: checkpoints go to rank 0's folder; else each folder keeps its part.
    """

    def __init__(self, root: Path, folders: Folders, *, world: World, gathers: bool) -> None:
        assert world.save_group is not None, "ranks that share no folder are several"
        self.root = root
        self.gathers = gathers
        self.keeps = folders.rank == 0 if gathers else folders.is_leader
        self._folders = folders
        self._group: dist.ProcessGroup = world.save_group
        self._prepared: str | None = None
        """The id of a save of which this folder has all but the name."""
        self.is_empty = self._clear_up(world)

    @property
    def where(self) -> str:
        """The folder, and the host that has it."""
        return f"{self.root} on {self._folders.hosts[0]}" if self.gathers else f"{self.root} of every host"

    def _clear_up(self, world: World) -> bool:
        """Sweep all folders together; True when none has a checkpoint."""
        vote, deadline = vote_of(world), Deadline(seconds=world.deadline_seconds)
        acts = self._folders.is_leader
        left = [draft.id for draft in prepared_drafts(self.root)] if acts else []
        texts = vote.exchange(0, Phase.LEFT, deadline, text=json.dumps(left).encode())
        drafts = {id for text in texts for id in parse(text) if is_id(str(id))}
        named = (
            [id for _, path in committed_names(self.root) if (id := _id_of(path)) in drafts] if acts and drafts else []
        )
        texts = vote.exchange(0, Phase.LEFT, deadline, text=json.dumps(named).encode())
        problem, is_empty = None, True
        if acts:
            try:
                sweep(self.root, finish={str(id) for text in texts for id in parse(text)})
                is_empty = not committed_names(self.root)
            except OSError as error:
                problem = f"cannot clear {self.root} up: {error}"
        texts = vote.exchange(0, Phase.LEFT, deadline, problem=problem, text=b"empty" if is_empty else b"has some")
        return all(text == b"empty" for text in texts)

    def begin(self, step: int) -> Draft:
        """Make the draft's folder on the first host."""
        return begin(self.root, step)

    def join(self, draft: Draft) -> None:
        """Make it here, where this folder is another one."""
        if self._folders.leader != 0:
            join(draft)

    def write(self, draft: Draft, rank: int, blobs: Mapping[str, Blob], cuts: Iterable[Cut]) -> Part:
        """Write into this folder's draft."""
        return write_part(draft, rank, blobs, cuts=cuts)

    def finish(self, draft: Draft, proposal: Proposal, vote: Votes) -> None:
        """Gather and commit, or prepare everywhere and commit everywhere."""
        if self.gathers:
            self._gather(draft, proposal, vote)
        else:
            self._finish_everywhere(draft, proposal, vote)

    def _gather(self, draft: Draft, proposal: Proposal, vote: Votes) -> None:
        away = [rank for rank, leader in enumerate(self._folders.leaders) if leader != 0]
        entries = {part.file: part.entry for part in proposal.parts}
        where = f"rank {vote.rank}, step {draft.step}, gathering shards"
        problem = None
        if vote.rank == 0:
            problem = told(proposal.manifest)
            for rank in away:
                peer, name = Peer(self._group, rank, deadline=proposal.deadline, where=where), shard_name(rank)
                if problem is None and name in entries:
                    problem = fetch_file(peer, draft.folder, name, entries[name])
                else:
                    peer.end()
            problem = problem or told(lambda: commit(draft, proposal.manifest()))
        elif vote.rank in away:
            peer = Peer(self._group, 0, deadline=proposal.deadline, where=where)
            serve_file(peer, draft.folder, shard_name(vote.rank))
        vote.exchange(draft.step, Phase.COMMIT, proposal.deadline, problem=problem)
        if self._folders.is_leader and vote.rank != 0:
            abandon(draft)

    def _finish_everywhere(self, draft: Draft, proposal: Proposal, vote: Votes) -> None:
        acts, deadline = self._folders.is_leader, proposal.deadline
        # Values may have times in them, which differ; there is one manifest, and its values are rank 0's.
        own = json.dumps(pack(proposal.values)).encode() if vote.rank == 0 else b""
        values = unpack(parse(vote.exchange(draft.step, Phase.PREPARE, deadline, text=own)[0]))
        problem = told(lambda: self._prepare(draft, proposal, values)) if acts else None
        vote.exchange(draft.step, Phase.PREPARE, deadline, problem=problem)
        problem = told(lambda: take_name(draft)) if acts else None
        try:
            vote.exchange(draft.step, Phase.COMMIT, deadline, problem=problem)
        except LostTouch:
            raise
        except SaveFailed:
            if acts:
                undo(draft)
            raise
        if acts:
            drop_replaced(draft)

    def _prepare(self, draft: Draft, proposal: Proposal, values: Mapping[str, object]) -> None:
        manifest = proposal.manifest(values)
        hosts = {shard_name(rank): host for rank, host in enumerate(self._folders.hosts)}
        with new_file(draft.folder / HOSTS) as fd:
            view = memoryview(json.dumps(hosts).encode())
            while view:
                view = view[os.write(fd, view) :]
        # From here on the others may find this folder ready, and take the name.
        self._prepared = draft.id
        prepare(draft, manifest)

    def is_committed(self, draft: Draft) -> bool:
        """Of another host's disk nothing is known."""
        return (self._folders.leader == 0 or not self.gathers) and has_name(draft, parts=not self.gathers)

    def name_of(self, draft: Draft) -> str:
        """Its folder; with the host, where only the first has it."""
        return f"{draft.final} on {self._folders.hosts[0]}" if self.gathers else str(draft.final)

    def abandon(self, draft: Draft, *, is_lost: bool) -> None:
        """Every folder's leader removes its draft; but not one that others may have committed, which the next start decides."""
        if self._folders.is_leader and not (is_lost and self._prepared == draft.id):
            abandon(draft)

    def mark_good(self, step: int) -> None:
        """See ``retention.mark_good``."""
        mark_good(self.root, step)

    def expire(self, *, newest: int, keep: int, keep_every: int | None, stays: Collection[int]) -> None:
        """See ``retention.expire``."""
        expire(self.root, newest=newest, keep=keep, keep_every=keep_every, stays=stays, parts=not self.gathers)

    def newest_good(self, until: int) -> int | None:
        """In the first folder."""
        return newest_good(self.root, until=until, parts=True)

    def fall_back(self, good: int | None) -> Fallback:
        """In the first folder."""
        return fall_back(self.root, good, parts=True)

    def follow_back(self, good: int | None) -> None:
        """In the others: what is newer there would be the newest of all."""
        if self._folders.is_leader and self._folders.rank != 0 and good is not None:
            set_aside(self.root, [step for step, _ in newer_than(self.root, good, parts=True)])

    def bring(self, world: World, step: int | None) -> Brought:
        """Put together, in every folder, what all of them have."""
        return Bringing(self.root, self._folders, self._group, vote_of(world), world.deadline_seconds).bring(step)

    def give_back(self, brought: Brought) -> None:
        """Remove what was put together."""
        if brought.is_copy and brought.path is not None and self._folders.is_leader:
            remove(brought.path)


def _id_of(path: Path) -> str | None:
    """Of the save that a folder is from; None where it cannot be read."""
    try:
        return glance(path, parts=True).id
    except (NotWhole, RequestError):
        return None


def vote_of(world: World) -> Vote:
    """The votes of all ranks, while no save is under way."""
    return Vote(world.save_group, rank=world.rank, world_size=world.size)
