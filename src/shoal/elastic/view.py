"""Who is there and who holds what: the value that the center publishes, and that every message's epoch refers to."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Role = Literal["server", "worker"]


@dataclass(frozen=True, kw_only=True)
class Member:
    """One process, in one instance."""

    id: str
    """The instance: drawn anew whenever the process starts, or comes back after it was taken for dead."""
    name: str
    """What people call it, the same over instances. No two living members have one name."""
    role: Role
    address: str = ""
    """Where it listens."""
    started: float = 0.0
    """When this instance began, on its machine's wall clock: of two with one name and one origin the later one counts."""
    origin: str = ""
    """The process, in people's words, the same over its instances; empty where somebody sees to it that there is one of each
    name. Of two processes with one name the later one waits until the earlier is dead, and is turned away while that lives."""


@dataclass(frozen=True, kw_only=True)
class Joining:
    """A replica that is being made from the primary."""

    server: str
    order: int
    """The epoch under which it was ordered: tells an answer to this order from one to an earlier order."""


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The replicas of one shard, by the ids of their servers."""

    primary: str
    backups: tuple[str, ...] = ()
    """Those that have everything that was acknowledged: nothing is acknowledged before they have it."""
    joining: tuple[Joining, ...] = ()
    """Those that will be backups once they have everything."""

    @property
    def synced(self) -> tuple[str, ...]:
        """Primary and backups: each could go on alone."""
        return (self.primary, *self.backups)

    @property
    def replicas(self) -> tuple[str, ...]:
        """Every server that holds something of this shard."""
        return (*self.synced, *(one.server for one in self.joining))


@dataclass(frozen=True, kw_only=True)
class View:
    """The membership and the shard map under one epoch. Two views with the same epoch are the same view."""

    epoch: int
    servers: tuple[Member, ...]
    workers: tuple[Member, ...]
    chains: tuple[Chain, ...]
    """One for each shard."""
    history: int = 0
    """How often everything went back to the checkpoint. A replica of an earlier history holds nothing that counts any more."""
    lost: tuple[str, ...] = ()
    """The servers, by name, whose deaths did that the last time: those since every shard last had all its copies."""

    def __iter__(self) -> Iterator[Member]:
        """Every member, servers first."""
        return iter((*self.servers, *self.workers))

    def find(self, id: str) -> Member | None:
        """The member with this id."""
        return next((member for member in self if member.id == id), None)

    def member(self, id: str) -> Member:
        """The member with this id, who is there."""
        found = self.find(id)
        assert found is not None, f"{id} is not in epoch {self.epoch}"
        return found
