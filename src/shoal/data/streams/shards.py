"""Iterable datasets that shard themselves: each replica reads its own shard, and nobody reads the whole stream.

A dataset says so by a method ``shard(replica, num_replicas)`` with these parameter names, which returns what that replica reads.
(Other libraries have methods of this name with other parameters; those are left alone.) Shards need not be of one length and
nobody has to know it: in every step the replicas tell each other how many samples they have, one that is at the end of its
shard has none, and the epoch is over for all when none has any. This is the one place where loading talks to other processes,
and the calling thread does it, never one that loads ahead.

A place is one of every replica, so a checkpoint keeps all of them. It is taken up by as many replicas. By another number only
where the dataset can deal out anew what is left: ``reshard(states, replica, num_replicas)`` gets what the ``state_dict`` of
each old shard said (None for one that was at its end) and returns what the new shard's ``load_state_dict`` takes.
"""

import inspect
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import torch

from shoal.comm.world import World
from shoal.core.errors import RequestError, RunError
from shoal.core.functions import call_own
from shoal.data.order import Position
from shoal.data.streams.statevalues import decode_state, encode_state
from shoal.telemetry.memory import is_out_of_memory

_SHARDED = '{"shard'
_PARAMETERS = ("replica", "num_replicas")


def shards_itself(dataset: Any) -> bool:
    """True for a dataset with a method ``shard(replica, num_replicas)``."""
    method = getattr(dataset, "shard", None)
    if not callable(method):
        return False
    try:
        names = inspect.signature(method).parameters
    except (TypeError, ValueError):  # Written in C.
        return False
    return all(name in names for name in _PARAMETERS)


def take_shard(dataset: Any, *, replica: int, num_replicas: int) -> Any:
    """What one replica reads of a dataset that shards itself.

    Raises:
        RunError: its method fails, or returns nothing that can be iterated.
    """
    what = f"{type(dataset).__name__}.shard(replica={replica}, num_replicas={num_replicas})"
    found = call_own(
        lambda: dataset.shard(replica=replica, num_replicas=num_replicas),
        what=what,
        is_excused=is_out_of_memory,
        refusal=RunError,
    )
    if not hasattr(found, "__iter__"):
        raise RunError(
            f"{what} returned a {type(found).__name__}, which cannot be iterated; return an iterable dataset"
        )
    return found


@dataclass(frozen=True, kw_only=True)
class ShardPlace:
    """Where one replica is in its shard."""

    replica: int
    num_replicas: int
    offset: int = 0
    """Samples of the shard that were handed out in this epoch."""
    is_over: bool = False
    stream: str = ""
    """What the shard said of itself there."""

    def position(self, *, epoch: int, offset: int) -> Position:
        """The data's position after ``offset`` samples of all replicas, as this replica alone knows it."""
        return Position(epoch=epoch, offset=offset, stream=json.dumps({"shard": asdict(self)}))


def gather_position(position: Position, world: World) -> Position:
    """The position with the places of all replicas, as a checkpoint keeps it; any other is given back as it is.

    All ranks call it together.
    """
    own = _read(position)
    if not isinstance(own, ShardPlace):
        return position
    return replace(
        position, stream=json.dumps({"shards": [asdict(one) for one in _gather(own, world)]}, separators=(",", ":"))
    )


def own_place(
    position: Position, dataset: Any, *, replica: int, num_replicas: int, why_no_state: Callable[[], str | None]
) -> ShardPlace:
    """Where this replica goes on at a position.

    Args:
        position: of this replica, or with the places of all.
        dataset: the one that shards itself.
        replica: this replica's number.
        num_replicas: how many there are.
        why_no_state: why the shards cannot be set by a state; None where they can.

    Raises:
        RequestError: it was saved by another number of replicas, and the dataset cannot deal out anew what is left.
        RunError: it is of no dataset that shards itself, or ``reshard`` fails.
    """
    if position.offset == 0:
        return ShardPlace(replica=replica, num_replicas=num_replicas)
    found = _read(position)
    name = type(dataset).__name__
    if found is None:
        raise RunError(
            f"{name} shards itself (it has shard(replica, num_replicas)), and the data position is of a stream that replicas "
            "read whole; resume with the dataset that the checkpoint was made with"
        )
    places = [found] if isinstance(found, ShardPlace) else found
    if places[0].num_replicas == num_replicas:
        own = [one for one in places if one.replica == replica]
        if len(own) != 1:
            raise RunError(f"the data position has {len(own)} places of replica {replica}; it is damaged")
        return own[0]
    return _reshard(places, dataset, position, ShardPlace(replica=replica, num_replicas=num_replicas), why_no_state())


def refuse_shards(position: Position, dataset: Any) -> None:
    """Refuse a position of a dataset that sharded itself for one that does not.

    Raises:
        RunError: says so.
    """
    if position.stream.startswith(_SHARDED):
        raise RunError(
            f"the data position is of a dataset that sharded itself, and {type(dataset).__name__} has no method "
            "shard(replica, num_replicas); resume with the dataset that the checkpoint was made with"
        )


def _reshard(
    places: list[ShardPlace], dataset: Any, position: Position, own: ShardPlace, why_no_state: str | None
) -> ShardPlace:
    name, before = type(dataset).__name__, places[0].num_replicas
    situation = (
        f"{name} shards itself, the checkpoint has the places of {before} replicas in their shards, {position.offset} samples "
        f"into epoch {position.epoch}, and this run has {own.num_replicas} replicas"
    )
    way_out = f"resume with {before} replicas (the next epoch may have any number)"
    if not callable(getattr(dataset, "reshard", None)):
        raise RequestError(
            f"{situation}: what is left cannot be dealt out anew without repeating or losing samples; {way_out}, or give {name} "
            "a method reshard(states, replica, num_replicas) that returns the state of a new shard"
        )
    missing = [one.replica for one in places if not one.is_over and not one.stream]
    if missing or why_no_state is not None:
        reason = why_no_state or f"the shard of replica {missing[0]} had no state_dict"
        raise RequestError(f"{situation}: reshard needs the states of the shards, and {reason}; {way_out}")
    saved = [None if one.is_over else decode_state(one.stream) for one in places]
    states = [None if one is None else one["state"] for one in saved]
    kind = next((one["of"] for one in saved if one is not None), None)
    # Two shards that go on by different counts must not draw alike: numbers of samples go on above all that were handed out.
    offset = -(-position.offset // own.num_replicas)
    if kind is None:
        return replace(own, offset=offset, is_over=True)
    state = call_own(
        lambda: dataset.reshard(states, replica=own.replica, num_replicas=own.num_replicas),
        what=f"{name}.reshard of {before} states to replica {own.replica} of {own.num_replicas}",
        is_excused=is_out_of_memory,
        refusal=RunError,
    )
    text = encode_state({"of": kind, "state": state, "draws": None}, origin=f"what {name}.reshard returned")
    return replace(own, offset=offset, stream=text)


def _read(position: Position) -> ShardPlace | list[ShardPlace] | None:
    """The place or the places that a position holds; None for one of another kind."""
    try:
        values = json.loads(position.stream) if position.stream else {}
        if not isinstance(values, dict) or not set(values) & {"shard", "shards"}:
            return None
        if "shard" in values:
            return ShardPlace(**values["shard"])
        found = [ShardPlace(**one) for one in values["shards"]]
        if not found or len({one.num_replicas for one in found}) != 1 or len(found) != found[0].num_replicas:
            raise ValueError(f"{len(found)} places")
    except (TypeError, ValueError, AttributeError) as error:
        raise RunError(f"the state of a dataset that shards itself cannot be read: {error}") from error
    return found


def _gather(own: ShardPlace, world: World) -> list[ShardPlace]:
    """The places of all replicas, in their order; ranks that share a replica have the same one."""
    text = json.dumps(asdict(own)).encode()
    sizes = world.all_gather(torch.tensor([len(text)], dtype=torch.int64, device=world.device))
    padded = torch.zeros(max(int(one) for one in sizes), dtype=torch.uint8)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    found: dict[int, ShardPlace] = {}
    for size, part in zip(sizes, world.all_gather(padded.to(world.device)), strict=True):
        one = ShardPlace(**json.loads(part[: int(size)].cpu().numpy().tobytes()))
        found[one.replica] = one
    return [found[replica] for replica in sorted(found)]


class OwnPart(Protocol):
    """What a replica has read of its shard for a step."""

    @property
    def epoch(self) -> int:
        """Of its samples."""

    @property
    def own_samples(self) -> int:
        """How many there are; 0 at the end of the shard's epoch."""


class ShardSteps:
    """Makes global steps of what replicas read from their shards. One for each loader.

    Args:
        world: the processes; None where there are none but this one.
        place: where this replica is.
        position: where the data is.
    """

    def __init__(self, world: World | None, place: ShardPlace, position: Position) -> None:
        self._world, self._place = world, place
        self._epoch, self._offset = position.epoch, position.offset
        self._held: Any = None
        self._num_barren = 0

    def next(self, read: Callable[[], Any], name: str) -> tuple[Any, list[int], Position]:
        """This replica's part of the next step, the samples of every replica in it, and where the data is after it.

        The part is the end of the shard, without a sample, where other replicas have some left. All ranks call it together.

        Args:
            read: gives what this replica reads next, each shard's epoch followed by one part without samples.
            name: of the dataset, for the message.

        Raises:
            RunError: no replica has a sample in a whole epoch. All ranks raise together.
        """
        while True:
            if self._held is None:
                self._held = read()
            part = self._held
            counts = self._counts(part.own_samples)
            if any(counts):
                break
            self._num_barren = self._num_barren + 1 if self._offset == 0 else 0
            if self._num_barren == 2 or (self._num_barren == 1 and self._epoch == 0):
                raise RunError(
                    f"no shard of {name} yields a sample in epoch {self._epoch}; let shard(replica, num_replicas) give datasets "
                    "whose __iter__ begins anew, or train for fewer steps"
                )
            self._held, self._epoch, self._offset = None, self._epoch + 1, 0
            self._place = replace(self._place, offset=0, is_over=False, stream="")
        self._num_barren = 0
        self._offset += sum(counts)
        if part.own_samples:
            self._held = None
            at: Position = part.position
            # A short part is the last one of its shard, and the reader knows it.
            is_over = at.epoch != part.epoch
            self._place = replace(self._place, offset=at.offset, is_over=is_over, stream=at.stream)
        else:
            self._place = replace(self._place, is_over=True, stream="")
        return part, counts, self._place.position(epoch=self._epoch, offset=self._offset)

    def _counts(self, own: int) -> list[int]:
        """Samples of every replica in this step."""
        if self._world is None:
            return [own] * self._place.num_replicas  # A rehearsal: the others are taken to be alike.
        told = torch.zeros(self._place.num_replicas, dtype=torch.int64)
        told[self._place.replica] = own
        ranks_each = self._world.size // self._place.num_replicas
        summed = self._world.all_reduce_(told.to(self._world.device)).tolist()
        return [count // ranks_each for count in summed]
