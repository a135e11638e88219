"""A voter as a process: drives ``majority.py`` by a clock, over the wire, with its ballot on disk.

    voter = Voters(name="a", address="tcp://10.0.0.1:7000", voters={"a": "tcp://10.0.0.1:7001", ...}, ballot=Path("a.ballot"))
    await voter.start()
    epoch = await voter.campaign()

A candidate that is on the wire already gives its node, whose operations include those of votes, and brings here what its listener
is asked of them (``answer``): then one address does for votes and all else.

Everything belongs to one event loop. The ballot is synced to disk before anybody hears of it, which blocks that loop for a few
milliseconds once in an election.

``Sole`` is the center where there is only one candidate: nobody is elected, and nobody takes over when it dies. What is left of
the promise of ``elector.py`` is the epoch. It is on disk before anybody hears of it, so a center that is started again leads
under a higher one than before.
"""

import asyncio
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from shoal.comm.wire.errors import Refused, WireError
from shoal.comm.wire.keys import Keys
from shoal.comm.wire.listener import Request
from shoal.comm.wire.node import Node, new_instance_id
from shoal.core.clock import Deadline
from shoal.core.errors import RequestError
from shoal.elastic.election import majority
from shoal.elastic.election.elector import Center, Deposed
from shoal.elastic.election.filelease import boot_seconds
from shoal.elastic.election.majority import OPERATIONS, Ballot, Found, Message, Noted, Poll, Renew, Resigned, Seek

_TICKS_PER_LEASE = 50
_TRIES_PER_LEASE = 6
_MARGIN = 0.1
"""The part of the lease that the leader itself does not use: time for an instruction on its way out."""


class Voters:
    """One voter, who may be a candidate. See ``Elector``.

    Args:
        name: this one's name among the voters.
        address: where the members find it when it leads.
        voters: the address of every voter, by name; the same list for all of them.
        ballot: the file that holds its votes. It must survive the process, and belong to it alone.
        lease_seconds: how long a leader may be silent; the same for all voters.
        drift: the most by which two clocks may differ in rate.
        seed: of the random turns of candidates.
        keys: for voters on other machines.
        node: that of the process, which listens already at this voter's address; without one there is a node for the votes alone.

    Raises:
        RequestError: fewer than three voters, this one is not among them, or its ballot cannot be read.
    """

    def __init__(
        self,
        *,
        name: str,
        address: str,
        voters: Mapping[str, str],
        ballot: Path,
        lease_seconds: float = 2.0,
        drift: float = 0.02,
        seed: int = 0,
        keys: Keys | None = None,
        node: Node | None = None,
    ) -> None:
        terms = majority.Terms(voters=tuple(sorted(voters)), lease_seconds=lease_seconds, drift=drift, seed=seed)
        terms.check()
        if name not in voters:
            raise RequestError(f"{name!r} is not one of the voters {', '.join(terms.voters)}")
        self.name = name
        self.lease_seconds = lease_seconds
        self._voters = dict(voters)
        self._file = ballot
        self._is_guest = node is not None
        self._node = node or Node(instance_id=new_instance_id(), operations=OPERATIONS, keys=keys)
        self.heard_at = boot_seconds()
        """When any other voter was last heard of, on the clock of ``boot_seconds``."""
        self._state = majority.begin(
            name, address=address, terms=terms, ballot=load_ballot(ballot, name=name), now=boot_seconds()
        )
        self._changed = asyncio.Event()
        self._ticking: asyncio.Task[None] | None = None
        self._calls: set[asyncio.Task[None]] = set()

    @property
    def epoch(self) -> int:
        """See ``Elector``."""
        return self._state.epoch

    async def start(self) -> str:
        """Begin to vote.

        Returns:
            The address that it listens on.
        """
        own = self._voters[self.name]
        listening = own if self._is_guest else await self._node.listen(own, self.answer)
        self._ticking = asyncio.get_running_loop().create_task(self._tick())
        return listening

    async def close(self) -> None:
        """Resign, and vote no longer."""
        await self.resign()
        if self._ticking is not None:
            self._ticking.cancel()
        if self._calls:
            await asyncio.wait(self._calls)
        if not self._is_guest:
            await self._node.close()

    async def campaign(self) -> int:
        """See ``Elector``."""
        assert self._ticking is not None, "start it first"
        self._state = majority.stand(self._state)
        while not self.is_valid():
            await self._wait(self.lease_seconds)
        return self._state.epoch

    async def advance(self) -> int:
        """See ``Elector``."""
        epoch = self._state.epoch + 1
        self._act(majority.advance(self._state, boot_seconds()))
        while self._state.is_valid(boot_seconds()) and self._state.epoch < epoch:
            if not await self._wait(self.lease_seconds / _TRIES_PER_LEASE):
                self._act(majority.extend(self._state, boot_seconds()))
        self._check(f"no majority granted epoch {epoch}")
        return self._state.epoch

    async def renew(self) -> None:
        """See ``Elector``."""
        wanted = boot_seconds() + self.lease_seconds
        self._act(majority.extend(self._state, boot_seconds()))
        while self._state.is_valid(boot_seconds()) and self._state.lease_until < wanted:
            if not await self._wait(self.lease_seconds / _TRIES_PER_LEASE):
                self._act(majority.extend(self._state, boot_seconds()))
        self._check("no majority renewed its lease")

    def is_valid(self) -> bool:
        """See ``Elector``."""
        return self._state.is_valid(boot_seconds() + _MARGIN * self.lease_seconds)

    async def resign(self) -> None:
        """See ``Elector``. It goes on voting."""
        self._act(majority.resign(self._state, boot_seconds()))

    def _check(self, why: str) -> None:
        if not self._state.is_valid(boot_seconds()):
            self._state = majority.demote(self._state, boot_seconds())
            self._state = majority.resign(self._state, boot_seconds())[0]
            raise Deposed(
                f"candidate {self.name!r} was deposed from epoch {self._state.epoch}: {why} within "
                f"{self.lease_seconds:g} s; it may campaign again"
            )

    async def _wait(self, seconds: float) -> bool:
        """Wait until something changed; False when nothing did for so long."""
        self._changed.clear()
        try:
            # Not wait_for: before Python 3.12 it forgets a cancellation that comes together with the change.
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def _tick(self) -> None:
        while True:
            self._act(majority.tick(self._state, boot_seconds()))
            await asyncio.sleep(self.lease_seconds / _TICKS_PER_LEASE)

    def _act(self, step: majority.Step) -> None:
        for name, message in self._take(step):
            task = asyncio.get_running_loop().create_task(self._ask(name, message))
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)

    def _take(self, step: majority.Step) -> list[majority.Envelope]:
        """Make a step ours: the ballot first, then all else."""
        state, messages = step
        if state.ballot != self._state.ballot:
            save_ballot(self._file, state.ballot, name=self.name)
        if state is not self._state:
            self._changed.set()
        self._state = state
        return messages

    async def _ask(self, name: str, message: Message) -> None:
        try:
            answer = await self._node.connect(self._voters[name]).call(
                message, deadline=self.lease_seconds / _TRIES_PER_LEASE
            )
        except WireError:
            # Dead, cut off, or late: the next try will tell.
            return
        self.heard_at = boot_seconds()
        if not isinstance(answer.body, Noted):
            self._act(majority.receive(self._state, answer.body, boot_seconds()))

    async def answer(self, request: Request) -> None:
        """Answer what another voter, or a member who looks for the center, asks."""
        body = request.body
        if isinstance(body, Seek):
            state, leads = self._state, self.is_valid()
            await request.answer(Found(state.epoch, state.name, state.address) if leads else Found(0, "", ""))
            return
        assert isinstance(body, Poll | Renew | Resigned)
        asker = body.candidate if isinstance(body, Poll) else body.leader
        if asker not in self._voters or asker == self.name:
            await request.refuse("stranger", f"{asker!r} is not another of the voters {', '.join(self._voters)}")
            return
        self.heard_at = boot_seconds()
        messages = self._take(majority.receive(self._state, body, boot_seconds()))
        await request.answer(messages[0][1] if messages else Noted())


async def find_center(voters: Collection[str], *, deadline: Deadline, keys: Keys | None = None) -> Center:
    """Ask the voters, by their addresses, until one of them leads.

    Raises:
        RunError: none did within the deadline.
    """
    node = Node(instance_id=new_instance_id(), operations=OPERATIONS, keys=keys)

    async def seek(address: str) -> Any:
        try:
            return (await node.connect(address).call(Seek(), deadline=min(0.5, max(0.05, deadline.remaining)))).body
        except WireError as error:
            if isinstance(error, Refused):
                raise
            return Found(0, "", "")

    try:
        while True:
            found = await asyncio.gather(*(seek(address) for address in voters))
            newest = max(found, key=lambda one: one.epoch)
            if newest.epoch:
                return Center(epoch=newest.epoch, address=newest.address, name=newest.name)
            deadline.check(f"one of the voters at {', '.join(voters)} to lead")
            await asyncio.sleep(0.05)
    finally:
        await node.close()


def save_ballot(path: Path, ballot: Ballot, *, name: str) -> None:
    """Write a ballot so that a crash leaves the old one or the new one, whole, and a loss of power too."""
    beside = path.with_name(path.name + ".new")
    text = json.dumps({"name": name, "term": ballot.term, "vote": ballot.vote})
    with open(beside, "w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def load_ballot(path: Path, *, name: str) -> Ballot:
    """The ballot in a file; an empty one when there is none.

    Raises:
        RequestError: it is not a ballot, or another voter's. Voting without it could elect two leaders, so it is never made up.
    """
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        ballot = Ballot(term=int(said["term"]), vote=str(said["vote"]))
        owner = str(said["name"])
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return Ballot()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(f"{path} is not the ballot of a voter ({error}); take this voter out of the list") from error
    if owner != name:
        raise RequestError(f"{path} is the ballot of {owner!r}, not of {name!r}; give every voter a file of its own")
    return ballot


class Sole:
    """The only candidate. See ``Elector``.

    Args:
        name: who this is.
        address: where the members find it.
        ballot: the file that holds its epoch. It must survive the process, and belong to it alone.

    Raises:
        RequestError: the file cannot be read.
    """

    def __init__(self, *, name: str, address: str, ballot: Path) -> None:
        self.name = name
        self.address = address
        self._file = ballot
        self._epoch = load_ballot(ballot, name=name).term
        self._leads = False

    @property
    def epoch(self) -> int:
        """See ``Elector``."""
        return self._epoch

    async def campaign(self) -> int:
        """See ``Elector``."""
        self._leads = True
        return await self.advance()

    async def advance(self) -> int:
        """See ``Elector``."""
        save_ballot(self._file, Ballot(term=self._epoch + 1, vote=self.name), name=self.name)
        self._epoch += 1
        return self._epoch

    async def renew(self) -> None:
        """See ``Elector``. Nobody else can lead."""

    def is_valid(self) -> bool:
        """See ``Elector``."""
        return self._leads

    async def resign(self) -> None:
        """See ``Elector``."""
        self._leads = False

    async def answer(self, request: Request) -> None:
        """Answer a member who looks for the center."""
        if isinstance(request.body, Seek):
            await request.answer(Found(self._epoch, self.name, self.address) if self._leads else Found(0, "", ""))
        else:
            await request.refuse("stranger", f"{self.name} is the only candidate and takes no part in an election")
