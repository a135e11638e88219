"""The ranks of one host of a run that goes on when some die: what they say goes to the coordinator, which decides for all hosts.

The agent's supervisor of ranks (``launch/ranks.py``) asks this as it asks the group of a run on one host
(``launch/group/elastic.py``). Slots are numbered over all hosts, and each host's control board has all of them, though only its
own ranks write there.
"""

import contextlib
import queue
import time
from collections.abc import Mapping, Sequence

from shoal.core.clock import Deadline
from shoal.launch.group.control import ControlBoard
from shoal.launch.group.elastic import CONTROL_VARIABLE, MEMBER_VARIABLE, Start
from shoal.launch.hosts import messages
from shoal.launch.hosts.link import Link

_PACE_SECONDS = 0.5
_END_SECONDS = 30.0
"""How long ranks may take to end after one has said that all is done: one that came too late would wait for others."""


class RemoteGroup:
    """The members of one generation on this host.

    Args:
        link: the line to the coordinator.
        start: what it asked for.
    """

    def __init__(self, link: Link, start: messages.Start) -> None:
        self._link, self._generation, self._inbox = link, start.generation, link.group
        self.control = ControlBoard.create(start.num_ranks)
        self.host = start.env["SHOAL_HOST"]
        self.gave_up: str | None = None
        self.is_over = False
        self._limit: Deadline | None = None
        self._members = {slot: member for slot, member in zip(start.ranks, start.members, strict=True) if member}
        """By slot, of those that live."""
        self._told: dict[str, tuple[bool, int]] = {}
        self._to_start = [Start(slot=slot, member=member) for slot, member in self._members.items()]
        self._to_end: list[tuple[int, str]] = []
        self._paced = time.monotonic()

    @property
    def may_start_more(self) -> bool:
        """Until the run is over: a host whose ranks have all died may be asked to start others."""
        return not self.is_over

    @property
    def present(self) -> Sequence[int]:
        """The slots of this host in which a process is."""
        return sorted(self._members)

    def environment(self, start: Start) -> Mapping[str, str]:
        """What a process is told beside its place."""
        return {CONTROL_VARIABLE: str(self.control.fd), MEMBER_VARIABLE: start.member}

    def take_starts(self) -> Sequence[Start]:
        """Processes to start, once."""
        found, self._to_start = self._to_start, []
        return found

    def take_ends(self) -> Sequence[tuple[int, str]]:
        """Slots whose processes are to be ended, with the reason, once."""
        found, self._to_end = self._to_end, []
        return found

    def look(self) -> None:
        """Tell the coordinator what ranks have said since the last look, and do what it has told this host."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._obey(self._inbox.get_nowait())
        if self._limit is not None and self._limit.is_over:
            self._to_end, self._limit = [(slot, "the run is over") for slot in self._members], None
        paces = {}
        for slot, member in self._members.items():
            said = self.control.answers(slot)
            paces[member] = (said.pace.steps, said.pace.compute, said.pace.data)
            now = (said.is_ready, said.failed)
            if now != self._told.get(member, (False, 0)):
                self._told[member] = now
                suspect = -1 if said.suspect is None else said.suspect
                self._link.send(
                    messages.Said(
                        generation=self._generation, member=member, is_ready=now[0], failed=now[1], suspect=suspect
                    )
                )
        if time.monotonic() - self._paced > _PACE_SECONDS:
            self._paced = time.monotonic()
            self._link.send(messages.Paced(generation=self._generation, paces=paces), can_drop=True)

    def lost(self, slot: int, cause: str) -> None:
        """The process in a slot has ended before the run was done."""
        member = self._members.pop(slot, None)
        if member is not None:
            self._link.send(messages.Lost(generation=self._generation, member=member, cause=cause))

    def finish(self) -> None:
        """A rank has done all there was to do; if it is one of this host, the coordinator hears of its end."""
        if not self.is_over:
            self.is_over, self._limit = True, Deadline(seconds=_END_SECONDS)

    def close(self) -> None:
        """Let go of the memory."""
        self.control.close()

    def _obey(self, message: messages.ToGroup) -> None:
        if isinstance(message, messages.Publish):
            self.control.publish(message.epoch, message.text)
        elif isinstance(message, messages.Over):
            self.finish()
        elif isinstance(message, messages.EndMember):
            if self._members.get(message.slot) == message.member:
                self._to_end.append((message.slot, message.reason))
        elif message.slot not in self._members:
            self.control.clear(message.slot)
            self._members[message.slot] = message.member
            self._to_start.append(Start(slot=message.slot, member=message.member))
