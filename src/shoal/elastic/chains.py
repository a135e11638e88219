"""Which server holds what: pure decisions on the chains of replicas, one chain for each shard.

Only a synced backup is ever promoted. A chain without one has lost what was acknowledged since the last checkpoint, and then all
shards go back to it together: a version is a cut over all of them.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from shoal.elastic.view import Chain, Joining


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
