"""Which rank's snapshots are in whose memory (``elastic/copies.py``), and what a rank can give of them when a peer is gone."""

import os
from collections.abc import Sequence

import torch.distributed as dist

from shoal.elastic.commit import Shard
from shoal.elastic.copies import Offer, Snapshots, keep_snapshots, offer_snapshots, open_snapshots
from shoal.elastic.groupview import holder_of
from shoal.engine.state import RankState
from shoal.trainer.loop import Trainer
from shoal.trainer.samedata import gather_texts


def own_shard(trainer: Trainer, step: int) -> Shard:
    """The shard of a step's state that this rank has, under the layout that it trains with."""
    plan, rank = trainer.engine.plan, trainer.world.rank
    number = trainer.world.size if plan.zero else plan.ranks_per_replica
    return Shard(step=step, index=rank % number, num_shards=number)


class PeerCopies:
    """The snapshots of this rank, and those of others that it keeps. All ranks make it together.

    On one host the memory of the rank before is mapped, and a copy costs no message. Between hosts what a rank has written is
    sent to the next replica on another host, so that the death of a host loses nothing: as many bytes as the shard has, at
    every step. Ranks take part in the sum of a step when they have received what was sent at the one before, so that
    ``elastic/commit.py``'s rule holds there too.

    Args:
        trainer: under the view.
        hosts: of each replica, where there are several.
    """

    def __init__(self, trainer: Trainer, *, hosts: Sequence[str] = ()) -> None:
        self._world, size = trainer.world, trainer.engine.plan.ranks_per_replica
        world = trainer.world
        # Live tensors, which updates change in place.
        self._tensors = trainer.engine.state(trainer.progress.step).tensors
        own, offer = offer_snapshots(self._tensors, trainer.engine.state(trainer.progress.step).placements)
        self._kept: dict[int, Snapshots] = {world.rank: own}
        self._sends_to: list[int] = []
        self._receives_from: list[int] = []
        try:
            offers = gather_texts(world, offer.to_json())
            if len(set(hosts)) > 1:
                holders = {rank: holder_of(hosts, rank // size) * size + rank % size for rank in range(world.size)}
                self._sends_to = [holders[world.rank]]
                self._receives_from = [rank for rank, holder in holders.items() if holder == world.rank]
                self._kept |= {rank: keep_snapshots(Offer.parse(offers[rank]).layout) for rank in self._receives_from}
            else:
                peer = (world.rank - size) % world.size
                self._kept |= {peer: open_snapshots(Offer.parse(offers[peer]))}
            world.barrier()
        finally:
            # The mappings keep the memory alive.
            os.close(offer.descriptor)
        self._own = own
        self._num_shards = world.size

    def write(self, step: int) -> None:
        """Take a snapshot after so many steps. Between hosts all ranks do it together."""
        self._own.write(step, self._tensors)
        started = [
            work
            for peer in self._receives_from
            if (work := dist.irecv(self._kept[peer].open(step), src=peer, group=self._world.group)) is not None
        ]
        started += [
            work
            for peer in self._sends_to
            if (work := dist.isend(self._own.flat(step), dst=peer, group=self._world.group)) is not None
        ]
        for work in started:
            work.wait()
        for peer in self._receives_from:
            self._kept[peer].close(step)

    def held(self) -> dict[Shard, RankState]:
        """Every whole snapshot in this rank's memory."""
        return {
            Shard(step=step, index=rank, num_shards=self._num_shards): RankState(
                tensors=snapshots.read(step),
                placements={name: form.placement for name, form in snapshots.layout.forms.items()},
                all_weights=frozenset(),
                has_updates=True,
            )
            for rank, snapshots in self._kept.items()
            for step in snapshots.steps()
        }
