"""The vote on a checkpoint among servers, carried by the center instead of a process group.

See ``checkpoint/vote.py``: every rank casts a ballot, every rank sees all of them, and one no is a no for all. Called from the
thread that writes, while the event loop runs elsewhere.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from shoal.checkpoint.vote import LostTouch, Phase, SaveFailed
from shoal.core.clock import Deadline
from shoal.paramserver.messages import Ballot, Ballots

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
