"""Which start of its ranks a launcher's run is in, agreed on by the ranks through the store that the launcher gives them.

A launcher may start ranks again over the same store, which still has the keys of those that died, and its own count of
restarts may differ from host to host (torchrun counts the failures of each agent). So the ranks agree: every rank puts down an
id that only this process has, rank 0 proposes a round with the ids that it finds, and the round begins when each rank that it
names has answered. A rank that finds another process's id in its place waits for the next proposal. Everything else is kept
under the round's prefix.
"""

import json
import secrets
import time
from collections.abc import Mapping, Sequence

from torch._C._distributed_c10d import Store  # torch types this name only there

from shoal.core.clock import Deadline
from shoal.core.errors import RunError

_PROPOSAL, _COUNT = "shoal/round", "shoal/rounds"
_LOOK_SECONDS = 0.02


def agree_on_round(store: Store, *, rank: int, world_size: int, host: str, seconds: float) -> int:
    """The number of this start of the ranks: 0 for the first over this store.

    Args:
        store: where the ranks meet.
        rank: this one.
        world_size: how many there are.
        host: of this rank, for messages.
        seconds: how long the others may take to come.

    Raises:
        RunError: ranks did not come in time; names those that did, with their hosts.
    """
    own = json.dumps({"id": secrets.token_hex(8), "host": host})
    store.set(_hello(rank), own)
    limit = Deadline(seconds=seconds)
    proposed: dict[int, str] = {}
    number = -1
    while True:
        if rank == 0:
            found = _find(store, world_size)
            if found != proposed and len(found) == world_size:
                proposed, number = found, store.add(_COUNT, 1) - 1
                store.set(_PROPOSAL, json.dumps({"number": number, "ids": proposed}))
        else:
            number = _number_with(store, rank, own)
        if number >= 0:
            store.set(_answer(number, rank), own)
            answers = [_answer(number, other) for other in (range(world_size) if rank == 0 else [0])]
            begun = f"shoal/begun/{number}"
            if rank == 0 and store.check(answers):
                store.set(begun, "1")
            if store.check([begun]):
                return number
        if limit.is_over:
            raise RunError(_missing(_find(store, world_size), rank, world_size, seconds))
        time.sleep(_LOOK_SECONDS)


def _number_with(store: Store, rank: int, own: str) -> int:
    """The number of the proposal, if it names this process."""
    if not store.check([_PROPOSAL]):
        return -1
    proposal = json.loads(store.get(_PROPOSAL))
    return int(proposal["number"]) if proposal["ids"].get(str(rank)) == own else -1


def _find(store: Store, world_size: int) -> dict[int, str]:
    if store.check([_hello(rank) for rank in range(world_size)]):
        return {rank: store.get(_hello(rank)).decode() for rank in range(world_size)}
    return {rank: store.get(_hello(rank)).decode() for rank in range(world_size) if store.check([_hello(rank)])}


def _missing(found: Mapping[int, str], rank: int, world_size: int, seconds: float) -> str:
    missing: Sequence[int] = [other for other in range(world_size) if other not in found]
    came = ", ".join(f"rank {other} on {json.loads(text)['host']}" for other, text in sorted(found.items())[:8])
    if not missing:
        return f"rank {rank} waited {seconds:g} s for all {world_size} ranks to begin together ({came}): one died meanwhile"
    named = ", ".join(map(str, missing[:8]))
    return (
        f"rank {named} of {world_size} did not come within {seconds:g} s ({came} did): see whether its host is up, whether it "
        "reaches rank 0's address, and what it printed"
    )


def _hello(rank: int) -> str:
    return f"shoal/hello/{rank}"


def _answer(number: int, rank: int) -> str:
    return f"shoal/answer/{number}/{rank}"
