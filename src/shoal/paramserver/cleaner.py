"""The cleaner: throws away what a new epoch has made harmless. It never makes anything harmless itself.

Epochs and instances fence: after a view without a member nothing that this member sent, stored or left behind can count any
more. So cleaning is late, lazy and safe to forget. Every server and every center has a cleaner; the leading center's also looks
after files.

    of a departed worker     its clock and its work units (the update log, when it leaves), its pushes that no update will hold
    (the
                             shards, when the log says so), its window of duplicates and the memory that was lent to it, its
                             requests that are parked here (they end at their own deadline, and count as expired)
    of a departed server     the connection to it; its shards' copies are dropped by whoever a view takes them from
    of a dead process        its socket, its arenas, its lease files (swept with the next epoch)
"""

import asyncio
import contextlib
from collections import Counter
from pathlib import Path

from shoal.comm.wire.arena import sweep_arenas
from shoal.comm.wire.node import Node
from shoal.elastic.view import Member, View


class Cleaner:
    """See the module.

    Args:
        node: whose memory of others is cleaned.
        folder: sockets and arenas of the run on this machine, for the one who looks after files; None for all others.
    """

    def __init__(self, node: Node, *, folder: Path | None = None) -> None:
        self._node = node
        self._folder = folder
        self._known: dict[str, Member] = {}
        self.collected: Counter[str] = Counter()
        """What was thrown away, by kind."""

    async def take_view(self, view: View) -> None:
        """Collect what those left behind who are in no view any more."""
        present = {member.id: member for member in view}
        departed = [member for id, member in self._known.items() if id not in present]
        self._known = present
        for member in departed:
            await self._forget(member)
        if departed and self._folder is not None:
            await asyncio.to_thread(self._sweep, self._folder, departed)

    async def _forget(self, member: Member) -> None:
        self._node.forget(member.id)
        self.collected[member.role] += 1
        if member.address:
            await self._node.connect(member.address).close()

    def _sweep(self, folder: Path, departed: list[Member]) -> None:
        for member in departed:
            for path in folder.glob(f"*-{member.id}.sock"):
                with contextlib.suppress(OSError):
                    path.unlink()
                    self.collected["socket"] += 1
        # By lock and not by view: one that is only paused still owns its memory.
        self.collected["arena"] += len(sweep_arenas(folder))
