"""Who is there and who holds what: the value that the center publishes, and that every message's epoch refers to.

The functions are pure decisions on the chains of replicas, one chain for each shard. Only a synced backup is ever promoted. A
chain without one has lost what was acknowledged since the last checkpoint, and then all shards go back to it together: a
version is a cut over all of them.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
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


def lay_out(servers: Sequence[str], *, shards: int, backups: int) -> tuple[Chain, ...]:
    """Chains for replicas that all start from the same weights: server i has shard i, and backs up the shards before it."""
    number = len(servers)
    assert number
    depth = min(backups, number - 1)
    return tuple(
        Chain(
            primary=servers[shard % number],
            backups=tuple(servers[(shard + step) % number] for step in range(1, depth + 1)),
        )
        for shard in range(shards)
    )


def drop(chains: Sequence[Chain], *, living: Collection[str], epoch: int) -> tuple[tuple[Chain, ...], tuple[int, ...]]:
    """Take the dead out, and promote a synced backup where the primary died: the one that leads the fewest shards.

    Args:
        chains: as they were.
        living: the servers that are there.
        epoch: of the coming view; what joins a chain whose primary changes is ordered again under it.

    Returns:
        The chains, and the shards of which no synced replica is left; their chains are returned as they were.
    """
    load = Counter(chain.primary for chain in chains if chain.primary in living)
    kept: list[Chain] = []
    lost: list[int] = []
    for shard, chain in enumerate(chains):
        synced = [server for server in chain.synced if server in living]
        joining = tuple(one for one in chain.joining if one.server in living)
        if not synced:
            lost.append(shard)
            kept.append(chain)
        elif synced[0] == chain.primary:
            kept.append(Chain(primary=chain.primary, backups=tuple(synced[1:]), joining=joining))
        else:
            primary = min(synced, key=lambda server: (load[server], synced.index(server)))
            load[primary] += 1
            kept.append(
                Chain(
                    primary=primary,
                    backups=tuple(server for server in synced if server != primary),
                    joining=tuple(replace(one, order=epoch) for one in joining),
                )
            )
    return tuple(kept), tuple(lost)


def remove(chain: Chain, server: str) -> Chain:
    """Take a backup, or one that joins, out of a chain."""
    assert server != chain.primary
    return Chain(
        primary=chain.primary,
        backups=tuple(one for one in chain.backups if one != server),
        joining=tuple(one for one in chain.joining if one.server != server),
    )


def admit(chain: Chain, server: str) -> Chain:
    """Make one that joins a backup."""
    return replace(remove(chain, server), backups=(*chain.backups, server))


def fill(
    chains: Sequence[Chain],
    *,
    servers: Sequence[str],
    backups: int,
    epoch: int,
    unfit: Collection[tuple[int, str]] = (),
) -> tuple[Chain, ...]:
    """Order the backups that are missing, each at the server with the fewest replicas.

    Args:
        chains: as they are.
        servers: the living ones, in the order of preference.
        backups: how many each chain should have.
        epoch: of the coming view.
        unfit: pairs of shard and server that are not to be tried now.
    """
    load = Counter(server for chain in chains for server in chain.replicas)
    filled = list(chains)
    for shard, chain in enumerate(filled):
        while len(chain.replicas) < 1 + backups:
            free = [one for one in servers if one not in chain.replicas and (shard, one) not in unfit]
            if not free:
                break
            chosen = min(free, key=lambda server: (load[server], servers.index(server)))
            load[chosen] += 1
            chain = replace(chain, joining=(*chain.joining, Joining(server=chosen, order=epoch)))
        filled[shard] = chain
    return tuple(filled)


def even_out(chains: Sequence[Chain]) -> tuple[Chain, ...]:
    """Let a synced backup and its primary change roles where one leads two shards more than the other. Nothing is copied.

    A chain that something joins is left alone, because the joining would have to begin again; so is the first.
    """
    load = Counter(chain.primary for chain in chains)
    evened = list(chains)
    changed = True
    while changed:
        changed = False
        for shard, chain in enumerate(evened):
            # Not the first: the book is beside it, and two keepers with an input under way would be two books.
            if shard == 0 or chain.joining or not chain.backups:
                continue
            least = min(chain.backups, key=lambda server: (load[server], chain.backups.index(server)))
            if load[chain.primary] >= load[least] + 2:
                load[chain.primary] -= 1
                load[least] += 1
                rest = tuple(server for server in chain.backups if server != least)
                evened[shard] = Chain(primary=least, backups=(chain.primary, *rest))
                changed = True
    return tuple(evened)
