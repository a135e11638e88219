"""The places of a crew: every rank of a run with parameter servers, its process now, and what became of those before."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.core.errors import EXIT_DONE
from shoal.launch.blame import name_signal
from shoal.serverrun.spawning import Started


@dataclass(eq=False)
class Place:
    """One rank: its process now, and what became of those before."""

    rank: int
    role: str
    name: str
    group_rank: int = 0
    group: "list[Place]" = field(default_factory=list)
    """The ranks that live and die with it, itself among them, the leader first."""
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Of a leader: one start of its group at a time."""
    process: Started | None = None
    incarnation: str = ""
    step_at_death: int = -1
    futile_deaths: int = 0
    is_done: bool = False
    peak_rss_bytes: int = 0

    @property
    def leader(self) -> "Place":
        """Whom others take for all of the group."""
        return self.group[0]

    @property
    def is_running(self) -> bool:
        """True while there is a process."""
        return self.process is not None and self.process.returncode is None


def make_places(*, num_servers: int, num_workers: int, ranks_per_worker: int, num_centers: int) -> list[Place]:
    """Every rank, in order."""
    groups = [[f"server-{index}"] for index in range(num_servers)]
    for index in range(num_workers):
        groups.append([f"worker-{index}", *(f"worker-{index}.{rank}" for rank in range(1, ranks_per_worker))])
    groups += [[f"center-{index}"] for index in range(num_centers)]
    places: list[Place] = []
    for names in groups:
        group: list[Place] = []
        for group_rank, name in enumerate(names):
            role = name.partition("-")[0]
            group.append(Place(rank=len(places), role=role, name=name, group_rank=group_rank, group=group))
            places.append(group[-1])
    return places


def describe_end(code: int | None) -> str:
    """How a process ended that had not finished."""
    if code == EXIT_DONE:
        return "it left with exit code 0 without having finished"
    return f"killed by {name_signal(-code)}" if code is not None and code < 0 else f"exit code {code}"


def kill_one(process: Started) -> None:
    """Kill a process, unless it has ended."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()


async def kill_places(places: Sequence[Place]) -> None:
    """Kill those that run, and wait for their end."""
    for place in places:
        if place.process is not None and place.is_running:
            with contextlib.suppress(ProcessLookupError):
                place.process.kill()
            await place.process.wait()
