"""The center where there is only one candidate: nobody is elected, and nobody takes over when it dies.

What is left of the promise of ``elector.py`` is the epoch: it is on disk before anybody hears of it, so a center that is started
again, by hand or by whoever watches over it, leads under a higher one than before.
"""

from pathlib import Path

from shoal.comm.wire.listener import Request
from shoal.elastic.election.majority import Ballot, Found, Seek
from shoal.elastic.election.voters import load_ballot, save_ballot


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
