"""How the ranks agree about a save: every rank casts a ballot, every rank sees all of them, and one no is a no for all.

A ballot is a row of integers and, padded to the longest, its text: two tensor collectives on a group that nothing else uses,
each with the deadline of the save. No objects and no pickle go over the wire, and a length is checked before memory is taken
for it. The step and the phase are on every ballot, so ranks that have fallen out of step notice it instead of mixing two saves.
"""

from datetime import timedelta
from enum import IntEnum
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from shoal.core.clock import Deadline
from shoal.core.errors import RunError

_MAX_TEXT = 32 * 2**20
_MAX_PROBLEM = 2000
# A collective that starts late still gets a moment: a peer's no may already be waiting there.
_LEAST_SECONDS = 0.05


class Phase(IntEnum):
    """What a vote is about."""

    BEGIN = 1
    WRITE = 2
    COMMIT = 3
    LIST = 4
    PREPARE = 5
    """Every folder is asked whether it has all but the name, where each host keeps its part."""
    FOLDERS = 6
    """Who shares a folder with whom."""
    LEFT = 7
    """What dead saves have left in the folders."""
    OFFER = 8
    """Which checkpoints there are to load."""
    BRING = 9
    """What of one of them is where, and whether it has come."""


class SaveFailed(RunError):
    """A save failed, on every rank alike. The message says on which rank and why."""


class LostTouch(SaveFailed):
    """The ranks could not hear each other: one died or did not come in time. The group cannot be used again."""


class Votes(Protocol):
    """How ranks agree, whatever carries their ballots."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def world_size(self) -> int:
        """How many vote."""

    def exchange(
        self, step: int, phase: Phase, deadline: Deadline, *, problem: str | None = None, text: bytes = b""
    ) -> list[bytes]:
        """See ``Vote.exchange``."""


class Vote:
    """The ballots of one group of ranks; alone when there is no group."""

    def __init__(self, group: dist.ProcessGroup | None, *, rank: int, world_size: int) -> None:
        assert group is not None or world_size == 1, f"{world_size} ranks need a process group to vote"
        self.rank = rank
        self.world_size = world_size
        self._group = group

    def exchange(
        self, step: int, phase: Phase, deadline: Deadline, *, problem: str | None = None, text: bytes = b""
    ) -> list[bytes]:
        """Cast this rank's ballot; the text of every rank, by rank.

        Args:
            step: the step that is being saved.
            phase: what is being voted on.
            deadline: when to stop waiting for the others.
            problem: why this rank votes no; None is yes.
            text: what this rank tells the others with its yes.

        Raises:
            SaveFailed: at least one rank voted no.
            LostTouch: a rank did not come, or came with another step or phase.
        """
        body = text if problem is None else problem.encode()[:_MAX_PROBLEM]
        row = torch.tensor([step, phase, problem is None, len(body)], dtype=torch.int64)
        where = f"rank {self.rank}, step {step}, vote on {phase.name.lower()}"
        rows = [[int(number) for number in other] for other in self._gather(row, deadline, where)]
        for rank, (their_step, their_phase, _, length) in enumerate(rows):
            if (their_step, their_phase) != (step, phase):
                raise LostTouch(
                    f"{where}: rank {rank} votes on step {their_step}, phase {their_phase}; the ranks do not save together"
                )
            if not 0 <= length <= _MAX_TEXT:
                raise SaveFailed(f"{where}: rank {rank} has {length} bytes to say, more than {_MAX_TEXT}")
        longest = max(length for *_, length in rows)
        texts = [b""] * len(rows)
        if longest:
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: len(body)] = torch.frombuffer(bytearray(body), dtype=torch.uint8) if body else padded[:0]
            gathered = self._gather(padded, deadline, where)
            texts = [other.numpy().tobytes()[:length] for other, (*_, length) in zip(gathered, rows, strict=True)]
        noes = [
            f"rank {rank}: {texts[rank].decode(errors='replace')}"
            for rank, (_, _, yes, _) in enumerate(rows)
            if not yes
        ]
        if noes:
            raise SaveFailed("; ".join(noes))
        return texts

    def _gather(self, tensor: Tensor, deadline: Deadline, where: str) -> list[Tensor]:
        if self._group is None:
            return [tensor]
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        options = AllgatherOptions()
        options.timeout = timedelta(seconds=max(deadline.remaining, _LEAST_SECONDS))
        try:
            self._group.allgather([gathered], [tensor], options).wait()
        except RuntimeError as error:
            reason = str(error).splitlines()[0].split(". This is typically")[0]
            raise LostTouch(f"{where}: a rank did not come within {deadline.seconds:g} s, or died: {reason}") from error
        return gathered
