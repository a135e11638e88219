"""Bugs of parameter servers, each planted in the real path inside the role processes; see ``planted_bugs.py`` for their form.

Every role of a job plants the same bug, and ``world.rank`` tells which process it is: servers first, then workers.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from torch import Tensor

from shoal.comm.world import World
from shoal.core.placement import Patch
from shoal.core.updaterule import UpdateRule
from shoal.elastic.view import Chain
from shoal.paramserver import consistency, pushcodec
from shoal.paramserver.records import PushRecord, Read, Update
from shoal.paramserver.server import replica, shard, store
from shoal.paramserver.sharding import Piece
from shoal.paramserver.worker import client, flat
from shoal.serverrun.server import source
from shoal.serverrun.worker import connection, group
from shoal.verify.mutants.planted_bugs import Honest, PlantedBug, Swap, replaces


@replaces(shard.ShardState, "_aggregate")
def apply_twice(honest: Honest, self: shard.ShardState, record: Update) -> Any:
    """The last push of every update is added once more."""
    last = self._gradients[record.entries[-1].identity].gradient.clone()
    return honest(self, record).add_(last)


def drop_share(world: World) -> list[Swap]:
    """The last push of every update is forgotten."""
    return [_aggregate(lambda record: replace(record, entries=record.entries[:-1] or record.entries))]


def add_in_other_order(world: World) -> list[Swap]:
    """Pushes are added in another order than their shares have, as they would be on arrival."""
    return [_aggregate(lambda record: replace(record, entries=record.entries[::-1]))]


def scale_by_workers(num_workers: int) -> PlantedBug:
    """Every worker's gradient times the number of workers."""

    @replaces(flat.FlatModel, "collect_gradient")
    def scale(honest: Honest, self: flat.FlatModel) -> Any:
        return honest(self).mul_(num_workers)

    return scale


@replaces(source.ShardSource, "rate")
def use_next_rate(honest: Honest, self: source.ShardSource, number: int) -> Any:
    """An update is made with the learning rate of the one after it."""
    return honest(self, number + 1)


@replaces(client.Client, "_pull")
async def keep_first_weights(honest: Honest, self: client.Client, number: int, need: int) -> None:
    """A worker computes with the first weights that it got, and says that they are new."""
    span = self._weights[self._spans[number]]
    before = span.clone() if self.versions[number] >= 0 else None
    await honest(self, number, need)
    if before is not None:
        span.copy_(before)


def ignore_bound(world: World) -> list[Swap]:
    """No read has to be new: the update log asks for none, and a worker that has weights keeps them."""
    honest = client.Client._pull

    async def pull(self: client.Client, number: int, need: int) -> None:
        if self.versions[number] < 0:
            await honest(self, number, 0)

    return [Swap(consistency, "needs", lambda rule, step: 0), Swap(client.Client, "_pull", pull)]


def forget_lateness(late_rank: int) -> PlantedBug:
    """A late gradient counts as if it were new; one worker's first gradient is late for certain."""

    def bug(world: World) -> list[Swap]:
        def factors(
            rule: UpdateRule,
            lateness: consistency.Lateness,
            number: int,
            entries: Sequence[PushRecord],
            *others: object,
        ) -> tuple[float, ...]:
            total = float(sum(one.samples for one in entries))
            return tuple(one.samples / total for one in entries)

        return [Swap(consistency, "factors", factors), *(_late_once() if world.rank == late_rank else [])]

    return bug


def promote_old_weights(world: World) -> list[Swap]:
    """A backup that takes over goes back to the weights of the version before, and does not say so."""
    applied, promoted = replica.Replica.apply, store.ShardStore._adopt_update_log
    before: dict[int, Tensor] = {}

    async def apply(self: replica.Replica, found: Update, lr: float) -> None:
        before[id(self)] = self.state.weights.clone()
        await applied(self, found, lr)

    def adopt_update_log(self: store.ShardStore, chain: Chain) -> None:
        own = self.held.replicas.get(0)
        is_taking_over = self._identity == chain.primary and self.held.log_leader is None
        if is_taking_over and own is not None and id(own) in before:
            own.state.weights.copy_(before[id(own)])
        promoted(self, chain)

    return [Swap(replica.Replica, "apply", apply), Swap(store.ShardStore, "_adopt_update_log", adopt_update_log)]


@replaces(group.ScatterCollect, "_put")
def leave_part_behind(honest: Honest, self: group.ScatterCollect, name: str, patch: Patch, where: Tensor) -> None:
    """Of a worker that is a group, the ranks that are not its first bring zeros."""
    honest(self, name, patch, where)
    if self._channel.rank != group.LEADER:
        where.zero_()


def keep_part_of_weights(world: World) -> list[Swap]:
    """Of a worker that is a group, the ranks that are not its first keep the first weights that they got."""
    honest = group.ScatterCollect.scatter
    scattered: dict[str, Tensor] = {}

    def scatter(self: group.ScatterCollect) -> None:
        honest(self)
        if self._channel.rank == group.LEADER:
            return
        for name, parameter in self._parameters.items():
            parameter.data.copy_(scattered.setdefault(name, parameter.detach().clone()))

    return [Swap(group.ScatterCollect, "scatter", scatter)]


def _aggregate(change: Callable[[Update], Update]) -> Swap:
    """Change what a shard adds up, and nothing of what is written down about it."""
    honest = shard.ShardState._aggregate
    return Swap(shard.ShardState, "_aggregate", lambda self, record: honest(self, change(record)))


def _late_once() -> list[Swap]:
    honest = connection.ServerConnection.hand_in
    seen: list[int] = []

    def hand_in(self: connection.ServerConnection, gradient: Tensor, push: PushRecord, read: Read) -> "Future[bool]":
        if not seen:
            seen.append(1)
            # Answered when the others have closed an update.
            self.pull(push.version + 1)
        return honest(self, gradient, push, read)

    return [Swap(connection.ServerConnection, "hand_in", hand_in)]


@replaces(pushcodec.PushCompressor, "settle")
def forget_residual(honest: Honest, self: pushcodec.PushCompressor, *, is_kept: bool) -> None:
    """What a codec lost is never sent."""
    honest(self, is_kept=False)


@replaces(pushcodec.PushCodec, "compresses")
def compress_norms(honest: Honest, self: pushcodec.PushCodec, name: str) -> bool:
    """Norms and biases go through the codec too."""
    return True


@replaces(pushcodec.PushCodec, "_offset")
def count_blocks_from_slice(honest: Honest, self: pushcodec.PushCodec, piece: Piece) -> int:
    """Blocks begin where a shard's slice does, so that a number of servers changes the bits."""
    return 0
