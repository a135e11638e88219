"""The vote on a checkpoint, collected by the center: every server casts a ballot, and each is answered with all of them.

Those who vote are the primaries of the view. When a new view has others, a vote that is under way can never be whole: everyone
who waits is told so at once.
"""

import asyncio
from dataclasses import dataclass, field

import numpy as np

from shoal.comm.wire.listener import Request
from shoal.elastic.view import View
from shoal.paramserver.messages import Ballot
from shoal.paramserver.messages import Ballots as Answer

_REMEMBERED = 16
_MOST_VOTERS = 1 << 16


@dataclass
class _Vote:
    size: int
    texts: dict[int, bytes] = field(default_factory=dict)
    problems: dict[int, str] = field(default_factory=dict)
    void: str | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when all have voted, or it is void."""

    @property
    def is_whole(self) -> bool:
        return len(self.texts) == self.size


class Ballots:
    """The votes under way. A vote whose servers do not all come is forgotten by those who wait, at their own deadline."""

    def __init__(self) -> None:
        self._votes: dict[tuple[str, int, int], _Vote] = {}
        self._voters: str | None = None

    def take_view(self, view: View) -> None:
        """From now on these primaries vote; whoever waits for others is told that it waits in vain."""
        self._voters = name_voters(view)
        for (voters, _, _), vote in self._votes.items():
            self._check(voters, vote)

    async def cast(self, request: Request, ballot: Ballot) -> None:
        """Count a ballot and answer when all have come; one that is cast again, because its answer was lost, counts once."""
        if not 0 <= ballot.rank < ballot.world_size <= _MOST_VOTERS:
            await request.refuse("unfit", f"rank {ballot.rank} of {ballot.world_size} does not vote")
            return
        vote = self._find(ballot)
        vote.texts[ballot.rank] = bytes(request.payload) if request.payload is not None else b""
        if ballot.problem is not None:
            vote.problems[ballot.rank] = ballot.problem
        if vote.is_whole or vote.problems:
            # One no is enough; the others need not come.
            vote.over.set()
        try:
            async with asyncio.timeout(request.remaining):
                await vote.over.wait()
        except TimeoutError:
            missing = sorted(set(range(vote.size)) - set(vote.texts))
            await request.refuse("late", f"server {missing} did not vote on step {ballot.step} in time")
            return
        if vote.problems:
            problem = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(vote.problems.items()))
            await request.answer(Answer(lengths=(), problem=problem))
        elif vote.is_whole:
            texts = [vote.texts[rank] for rank in range(vote.size)]
            joined = np.frombuffer(b"".join(texts) or b"\0", dtype=np.uint8)
            await request.answer(Answer(lengths=tuple(len(text) for text in texts)), payload=joined)
        else:
            await request.answer(Answer(lengths=(), void=vote.void))

    def _find(self, ballot: Ballot) -> _Vote:
        key = (ballot.voters, ballot.step, ballot.phase)
        vote = self._votes.get(key)
        if vote is None or vote.size != ballot.world_size:
            vote = self._votes[key] = _Vote(size=ballot.world_size)
            for old in list(self._votes)[:-_REMEMBERED]:
                del self._votes[old]
        self._check(ballot.voters, vote)
        return vote

    def _check(self, voters: str, vote: _Vote) -> None:
        if self._voters is not None and voters.split(" ")[0] != self._voters and not vote.is_whole:
            vote.void = f"servers {voters} were to vote, and {self._voters} answer for the shards now"
            vote.over.set()


def name_voters(view: View) -> str:
    """The primaries of a view, each once."""
    return ",".join(sorted({chain.primary for chain in view.chains}))
