"""The processes of a job with parameter servers: a member for each rank, starting them, and telling the center of their ends.

No torch. Every process is this one's own child (``launch/supervisor.py``): it is seen to die at once, with its exit code, and
it dies with this one.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.comm.wire.errors import WireError
from shoal.comm.wire.node import Node
from shoal.core.clock import Deadline
from shoal.core.errors import EXIT_DONE
from shoal.elastic.election.elector import Center
from shoal.launch.blame import name_signal
from shoal.launch.forkclient import PRELOAD_OPTIMIZER, ForkClient
from shoal.launch.process import Process, Streams
from shoal.launch.supervisor import KILL_SECONDS, Command, Supervisor
from shoal.paramserver.contact import Find
from shoal.paramserver.messages import Message

_PRELOAD = ("shoal.serverrun.job.role", PRELOAD_OPTIMIZER)
_LOOK_SECONDS = 0.01


class Spawner:
    """Starts and ends processes in an event loop.

    Args:
        environment: of every process.
        descriptors: open files that they inherit.
    """

    def __init__(self, environment: Mapping[str, str], *, descriptors: Sequence[int]) -> None:
        self._client = ForkClient(_PRELOAD, environment)
        self._supervisor = Supervisor(self._client, environment=environment, descriptors=descriptors)
        self._on_end: dict[Process, Callable[[], None]] = {}

    def open(self) -> None:
        """Begin to import what roles need, and to watch for ends; what is started meanwhile waits for the former."""
        asyncio.get_running_loop().add_reader(self._supervisor.fileno(), self.look)
        self._client.open()

    def look(self) -> None:
        """Tell of those that have ended; called by itself where the system tells of ends."""
        for process in self._supervisor.turn(0):
            self._on_end.pop(process)()

    async def start(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        name: str,
        log: Path,
        on_end: Callable[[], None],
        is_forked: bool = True,
    ) -> Process:
        """Start ``python -m module arguments``, with its output in ``log``.

        Args:
            module: has a ``main``.
            arguments: of its command line.
            name: what messages call it.
            log: is appended to.
            on_end: called when it has ended.
            is_forked: False for what needs no torch, and is sooner there by itself.
        """
        if is_forked:
            self._client.open()  # Where the server died, another is tried.
            while not self._client.is_ready:
                await asyncio.sleep(_LOOK_SECONDS)
        command = Command(name=name, module=module, arguments=arguments, is_forked=is_forked)
        with log.open("ab", buffering=0) as output:
            process = self._supervisor.start(command, Streams(stdout=output.fileno(), stderr=output.fileno()))
        self._on_end[process] = on_end
        return process

    async def end(self, processes: Iterable[Process]) -> None:
        """Kill those that run, and wait for their ends."""
        ending = list(processes)
        self._supervisor.kill(ending)
        limit = Deadline(seconds=KILL_SECONDS)
        while any(process.is_running for process in ending) and not limit.is_over:
            await asyncio.sleep(_LOOK_SECONDS)
            self.look()

    def close(self) -> None:
        """End every process, and the fork server."""
        asyncio.get_running_loop().remove_reader(self._supervisor.fileno())
        self._supervisor.close()
        self._client.close()


@dataclass(eq=False)
class JobMember:
    """One rank: its process now, and what became of those before."""

    rank: int
    role: str
    name: str
    group_rank: int = 0
    group: "list[JobMember]" = field(default_factory=list)
    """The ranks that live and die with it, itself among them, the leader first."""
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Of a leader: one start of its group at a time."""
    process: Process | None = None
    instance_id: str = ""
    step_at_death: int = -1
    futile_deaths: int = 0
    is_done: bool = False
    peak_rss_bytes: int = 0

    @property
    def leader(self) -> "JobMember":
        """Whom others take for all of the group."""
        return self.group[0]

    @property
    def is_running(self) -> bool:
        """True while there is a process."""
        return self.process is not None and self.process.is_running


def make_members(*, num_servers: int, num_workers: int, ranks_per_worker: int, num_centers: int) -> list[JobMember]:
    """Every rank, in order."""
    groups = [[f"server-{index}"] for index in range(num_servers)]
    for index in range(num_workers):
        groups.append([f"worker-{index}", *(f"worker-{index}.{rank}" for rank in range(1, ranks_per_worker))])
    groups += [[f"center-{index}"] for index in range(num_centers)]
    members: list[JobMember] = []
    for names in groups:
        group: list[JobMember] = []
        for group_rank, name in enumerate(names):
            role = name.partition("-")[0]
            group.append(JobMember(rank=len(members), role=role, name=name, group_rank=group_rank, group=group))
            members.append(group[-1])
    return members


def describe_end(code: int | None) -> str:
    """How a process ended that had not finished."""
    if code == EXIT_DONE:
        return "it left with exit code 0 without having finished"
    return f"killed by {name_signal(-code)}" if code is not None and code < 0 else f"exit code {code}"


_ANSWER_SECONDS = 1.0
_FIND_SECONDS = 0.05
_REMEMBERED = 256


class Notifier:
    """Tells the center of deaths, and when to stop; every new center again, because it may not have heard what the old one did.

    The newest comes first: a run waits for the death of a moment ago, and hardly for one that the center before has dealt with.

    Args:
        node: on the wire.
        find: where the center is.
    """

    def __init__(self, node: Node, *, find: Find) -> None:
        self._node = node
        self._find = find
        self._news: list[Message] = []
        self._untold: list[Message] = []
        """What the present center has not heard, the newest last."""
        self._address = ""
        self._woken = asyncio.Event()

    def tell(self, message: Message) -> None:
        """To be told as soon as somebody listens. Returns at once."""
        self._news = [*self._news, message][-_REMEMBERED:]
        self._untold.append(message)
        self._woken.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            center = self._find()
            if center is not None and center.address != self._address:
                await self._turn_to(center)
            if center is None or not self._untold:
                self._woken.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_FIND_SECONDS):
                        await self._woken.wait()
            else:
                await self._tell_next(center)

    async def _turn_to(self, center: Center) -> None:
        if self._address:
            await self._node.connect(self._address).close()
        self._address, self._untold = center.address, list(self._news)

    async def _tell_next(self, center: Center) -> None:
        message = self._untold[-1]
        try:
            await self._node.connect(center.address).call(message, deadline=_ANSWER_SECONDS)
        except WireError:
            await asyncio.sleep(_FIND_SECONDS / 2)
            return
        # Not by its position: more may have been told of meanwhile.
        self._untold = [other for other in self._untold if other is not message]
