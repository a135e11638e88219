"""Checkpoints of a run with parameter servers: every server writes the shards that it answers for, at one version.

The version is a cut of the update log, the same on every server, so what is written together was true together; and the
copy is made between two updates, so training goes on while it is written. The files are those of every other run: they can be
resumed under any plan, shown, verified and exported.
"""

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.config import CheckpointConfig
from shoal.checkpoint.reader import read, read_local
from shoal.checkpoint.retention import Proven, mark_good, newest_good
from shoal.checkpoint.saver import Saver
from shoal.checkpoint.vote import LostTouch, Phase, SaveFailed
from shoal.checkpoint.whole import hash_manifest, newest_whole
from shoal.core.clock import Deadline
from shoal.core.errors import RunError
from shoal.core.events import CheckpointFailed, Event
from shoal.core.placement import Placement, place_whole
from shoal.core.rundir import RunDir
from shoal.engine.state import Outline
from shoal.paramserver.center.ballots import name_voters
from shoal.paramserver.messages import FINISHED, Ballot, Ballots
from shoal.paramserver.server.server import Server
from shoal.paramserver.server.shard import ShardState
from shoal.serverrun.server.residuals import held_residuals
from shoal.trainer.progress import Progress

LOG_KEY = "book"
"""The key under which a checkpoint's values have the update log."""
_LOOK_SECONDS = 0.2
_VIEW_SECONDS = 2.0
"""How long a new view may be on its way to a server whose vote it made void."""


class ServerCheckpointer:
    """Writes this server's part of each checkpoint.

    Args:
        run_dir: of the run.
        config: what is kept.
        plan: the plan's line.
        outline: every saved tensor of the whole model.
        fixed: what is saved and not trained, by checkpoint name; the first shard's server writes it.
        deadline_seconds: after which a save has failed.
        report: takes events; called from a thread.
        settle: puts what was reported on disk; called from a thread.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        config: CheckpointConfig,
        plan: str,
        outline: Outline,
        fixed: Mapping[str, torch.Tensor],
        deadline_seconds: float,
        report: Callable[[Event], None],
        settle: Callable[[], None],
    ) -> None:
        self._root = RunDir(run_dir).checkpoints
        self._config = config
        self._plan = plan
        self._saved_names = {entry.parameter: name for name, entry in outline.items() if entry.parameter}
        self._fixed = fixed
        self._deadline = deadline_seconds
        self._given_report = report
        self._settle = settle
        self._saver: Saver | None = None
        self._proven = Proven()
        self._versions: dict[int, int] = {}
        """Of the checkpoints from which no gradient has come yet, by step."""
        self._voters = ""
        self._version = -1
        self.failure: str | None = None
        """Why the newest save failed; None when it did not, or is under way."""

    async def save(self, server: Server, values: Mapping[str, Any], *, step: int, version: int) -> None:
        """Copy what this server answers for and begin to write it.

        Args:
            server: its shards.
            values: what is saved beside them, the same on every server.
            step: the checkpoint's name.
            version: what every shard must have; a server with one that is ahead votes no.
        """
        view = server.contact.view
        assert view is not None
        primaries = sorted({chain.primary for chain in view.chains})
        if server.identity not in primaries:
            return
        ahead = [shard for shard in server.leads if server.replicas[shard].version != version]
        if ahead:
            await self._abstain(server, primaries, step, f"shard {ahead[0]} is not at version {version} there any more")
            return
        await self._open(server, primaries)
        assert self._saver is not None
        tensors, placements = self._held(server, step)
        self._version = version
        self._versions[step] = version
        await asyncio.to_thread(self._saver.save, step, tensors, values, None, placements)

    def begin(self, step: int, version: int) -> None:
        """The run goes on from the checkpoint of this step, whose weights are of this version."""
        good = newest_good(self._root, until=step)
        self._proven.begin(step, good=good)
        self._versions = {} if good == step else {step: version}

    def take(self, versions: Sequence[int]) -> None:
        """Finite gradients came from these versions of the weights: a checkpoint that is no newer than all of them is good."""
        good = [step for step, version in self._versions.items() if version <= min(versions, default=-1)]
        if good:
            if self._saver is not None:
                self._saver.take(max(good) + 1)
            elif self._proven.take(max(good) + 1):
                # That of which the run began. Without the mark it would only be set aside for nothing.
                with contextlib.suppress(OSError):
                    mark_good(self._root, max(good))
            self._versions = {step: version for step, version in self._versions.items() if step > max(good)}

    async def save_last(self, server: Server, values: Mapping[str, Any], *, step: int, version: int) -> None:
        """See that the end of the run is written, by this server or by others, whoever answers for the shards by then.

        Raises:
            RunError: it could not be written.
        """
        limit, contact = Deadline(seconds=self._deadline), server.contact
        while contact.halt != FINISHED:
            limit.check("the last checkpoint to be written by the servers that answer for the shards")
            contact.check()
            view = contact.view
            assert view is not None
            led = [shard for shard, chain in enumerate(view.chains) if chain.primary == server.identity]
            if not led or led != server.leads:
                # Others write, or something is still on its way here.
                await contact.changed.wait(_LOOK_SECONDS)
                continue
            if self._saver is not None:
                await asyncio.to_thread(self._saver.wait)
            if version == self._version and self.failure is None:
                return
            await self.save(server, values, step=step, version=version)
            if self._saver is not None:
                await asyncio.to_thread(self._saver.wait)
            if self.failure is not None and not await self._are_others_to_vote(server):
                raise RunError(f"the last checkpoint could not be written: {self.failure}")

    async def _are_others_to_vote(self, server: Server) -> bool:
        """Whether the view changed since the vote that failed; a moment later, perhaps."""
        limit = Deadline(seconds=_VIEW_SECONDS)
        while server.contact.halt != FINISHED:
            view = server.contact.view
            assert view is not None
            if name_voters(view) != self._voters:
                return True
            if limit.is_over:
                return False
            await server.contact.changed.wait(limit.remaining)
        return True

    def close(self) -> None:
        """Wait for what was begun."""
        if self._saver is not None:
            self._saver.close()
            self._saver = None

    async def _abstain(self, server: Server, primaries: list[str], step: int, problem: str) -> None:
        rank, size = primaries.index(server.identity), len(primaries)
        ballot = Ballot(
            voters=",".join(primaries),
            step=step,
            phase=int(Phase.BEGIN),
            rank=rank,
            world_size=size,
            problem=problem,
        )
        try:
            await server.contact.ask(ballot, deadline=_VIEW_SECONDS, payload=b" ")
        except TimeoutError:
            return  # There is no center, so nobody else saves either.

    async def _open(self, server: Server, primaries: list[str]) -> None:
        """A saver for those who vote now: after a death these are others."""
        voters = ",".join(primaries)
        if self._saver is not None and voters == self._voters and self.failure is None:
            return
        # In a thread: what is still being written votes through this event loop.
        await asyncio.to_thread(self.close)
        self._voters, self.failure = voters, None
        rank, size = primaries.index(server.identity), len(primaries)

        async def cast(ballot: Ballot, text: bytes, seconds: float) -> tuple[Ballots, bytes]:
            # A payload of no bytes is none; a space is cut off again by its length.
            answer, joined = await server.contact.ask(ballot, deadline=seconds, payload=text or b" ")
            assert isinstance(answer, Ballots)
            return answer, joined

        vote = WireVote(cast, loop=asyncio.get_running_loop(), voters=voters, rank=rank, world_size=size)
        self._saver = Saver(
            self._root,
            rank=rank,
            world_size=size,
            group=None,
            config=self._config,
            plan=self._plan,
            deadline_s=self._deadline,
            report=self._report,
            settle=self._settle,
            vote=vote,
            proven=self._proven,
        )

    def _report(self, event: Event) -> None:
        if isinstance(event, CheckpointFailed):
            self.failure = event.reason
        self._given_report(event)

    def _held(self, server: Server, step: int) -> tuple[dict[str, torch.Tensor], dict[str, Placement]]:
        tensors: dict[str, torch.Tensor] = {}
        placements: dict[str, Placement] = {}
        for shard, replica in sorted(server.replicas.items()):
            if server.is_primary(shard):
                found, places = held_by(replica.state, self._saved_names)
                kept, kept_places, silent = held_residuals(replica.state, self._saved_names, step)
                tensors |= found | kept
                placements |= places | kept_places
                for index in silent:
                    print(
                        f"checkpoint at step {step}: nothing is known of what worker {index} has not sent of shard {shard}; its "
                        "part is saved as nothing",
                        file=sys.stderr,
                        flush=True,
                    )
        if server.is_primary(0):
            tensors |= self._fixed
            placements |= {name: place_whole(tensor.shape) for name, tensor in self._fixed.items()}
        return merge_parts(tensors, placements)


def held_by(state: ShardState, saved_names: Mapping[str, str]) -> tuple[dict[str, torch.Tensor], dict[str, Placement]]:
    """A shard's part of weights and optimizer state by checkpoint name, and where it lies in the whole."""
    shard, where = state.shard.number, state.placements()
    tensors: dict[str, torch.Tensor] = {}
    placements: dict[str, Placement] = {}
    for name, tensor in state.parameters().items():
        tensors[f"weights/{saved_names[name]}#{shard}"] = tensor
        placements[f"weights/{saved_names[name]}#{shard}"] = where[name]
    for path, tensor in state.optimizer_state().items():
        name = path.rpartition("/")[0]
        has_rows = tensor.ndim > 0 and tensor.shape == state.parameters()[name].shape
        tensors[f"optimizer/{path}#{shard}"] = tensor
        placements[f"optimizer/{path}#{shard}"] = where[name] if has_rows else place_whole(tensor.shape)
    return tensors, placements


def merge_parts(
    tensors: Mapping[str, torch.Tensor], placements: Mapping[str, Placement]
) -> tuple[dict[str, torch.Tensor], dict[str, Placement]]:
    """Two shards of one server may hold rows of one tensor; a checkpoint wants one part of it from each server."""
    merged: dict[str, torch.Tensor] = {}
    places: dict[str, Placement] = {}
    for key, tensor in tensors.items():
        name = key.partition("#")[0]
        place = placements[key]
        if name not in merged:
            merged[name], places[name] = tensor, place
        elif place.patches != places[name].patches:
            merged[name], places[name] = join_rows(merged[name], places[name], tensor, place)
    return merged, places


def join_rows(
    first: torch.Tensor, place: Placement, second: torch.Tensor, other: Placement
) -> tuple[torch.Tensor, Placement]:
    """Some rows of a tensor and some others of it, as one part."""
    shift = first.shape[0]
    moved = tuple(
        replace(patch, local_start=(patch.local_start[0] + shift, *patch.local_start[1:])) for patch in other.patches
    )
    joined = torch.cat((first, second))
    return joined, Placement(
        whole_shape=place.whole_shape, local_shape=tuple(joined.shape), patches=place.patches + moved
    )


def read_checkpoint(run_dir: Path) -> tuple[Path, str, Progress, str | None] | None:
    """The newest whole checkpoint, its manifest's hash, how far it is, and the update log in it, where parameter servers wrote
    it.

    None when there is none.
    """
    found = newest_whole(RunDir(run_dir).checkpoints)
    if found.path is None:
        return None
    manifest = hash_manifest(found.path)
    values = read(found.path, wanted=lambda _: False, expect=manifest).values
    progress = Progress.from_values(values.get("progress"), origin=str(found.path))
    update_log = values.get(LOG_KEY)
    return found.path, manifest, progress, json.dumps(update_log) if update_log is not None else None


def load_shard(
    state: ShardState, path: Path, saved_names: Mapping[str, str], *, version: int, expect: str | None = None
) -> None:
    """Fill a shard from a checkpoint that any plan wrote; ``expect`` is the hash of its manifest.

    Raises:
        RunError: it is of another model or another optimizer.
    """
    tensors, placements = held_by(state, saved_names)
    tensors, placements = merge_parts(tensors, placements)
    loaded = read_local(path, placements, expect=expect)
    for name, target in tensors.items():
        if loaded[name].shape != target.shape or loaded[name].dtype != target.dtype:
            raise RunError(
                f"{path} does not fit: {name!r} is {loaded[name].dtype} {tuple(loaded[name].shape)} there, and this run needs "
                f"{target.dtype} {tuple(target.shape)}"
            )
        target.copy_(loaded[name])
    state.version = version


# The vote on a checkpoint among servers, carried by the center instead of a process group.
#
# See ``checkpoint/vote.py``: every rank casts a ballot, every rank sees all of them, and one no is a no for all. Called from
# the thread that writes, while the event loop runs elsewhere.

_MAX_PROBLEM = 2000

Cast = Callable[[Ballot, bytes, float], Coroutine[Any, Any, tuple[Ballots, bytes]]]
"""Brings a ballot and its text to the center, with seconds to do it in; the answer and everyone's texts."""


class WireVote:
    """The ballots of the servers of one view."""

    def __init__(self, cast: Cast, *, loop: asyncio.AbstractEventLoop, voters: str, rank: int, world_size: int) -> None:
        self._cast = cast
        self._voters = voters
        self._loop = loop
        self.rank = rank
        self.world_size = world_size

    def exchange(
        self, step: int, phase: Phase, deadline: Deadline, *, problem: str | None = None, text: bytes = b""
    ) -> list[bytes]:
        """Cast this server's ballot; the text of every server, by rank.

        Raises:
            SaveFailed: at least one voted no.
            LostTouch: not all came in time.
        """
        ballot = Ballot(
            voters=self._voters,
            step=step,
            phase=int(phase),
            rank=self.rank,
            world_size=self.world_size,
            problem=problem[:_MAX_PROBLEM] if problem is not None else None,
        )
        seconds = max(deadline.remaining, 0.05)
        try:
            work = asyncio.run_coroutine_threadsafe(self._cast(ballot, text, seconds), self._loop)
            answer, joined = work.result(seconds + 1.0)
        except (TimeoutError, RuntimeError) as error:
            raise LostTouch(
                f"server {self.rank}, step {step}, vote on {phase.name.lower()}: not all {self.world_size} servers voted "
                f"within {deadline.seconds:g} s: {error!r}"
            ) from error
        if answer.void is not None:
            raise LostTouch(f"step {step}, vote on {phase.name.lower()}: {answer.void}")
        if answer.problem is not None:
            raise SaveFailed(answer.problem)
        if len(answer.lengths) != self.world_size or sum(answer.lengths) > len(joined):
            raise LostTouch(f"the center answered {len(answer.lengths)} ballots, and {self.world_size} were cast")
        texts, start = [], 0
        for length in answer.lengths:
            texts.append(joined[start : start + length])
            start += length
        return texts
