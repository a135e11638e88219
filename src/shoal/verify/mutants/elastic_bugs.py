"""Bugs of runs that go on when replicas die, each planted in all ranks of such a run."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shoal.comm import carry, mesh
from shoal.core.logical import num_rounds
from shoal.elastic import copies
from shoal.trainer.elastic import rank, recovery
from shoal.verify.mutants.planted_bugs import Swap


def _forget_carry() -> list[Swap]:
    """The sum of a round is that of this round alone."""
    return [Swap(carry.CarriedSum, "_begin", lambda self, flat: None)]


def _deal_in_blocks() -> list[Swap]:
    """Replicas that are present compute neighbours, and add up in that order."""

    def rounds_of(place: int, *, num_logical: int, num_present: int) -> tuple[int | None, ...]:
        turns = num_rounds(num_logical, num_present)
        found = (place * turns + turn for turn in range(turns))
        return tuple(number if number < num_logical else None for number in found)

    return [Swap(mesh, "rounds_of", rounds_of)]


def _drop_shares() -> list[Swap]:
    """The samples of the dead are nobody's."""

    def rounds_of(place: int, *, num_logical: int, num_present: int) -> tuple[int | None, ...]:
        return (place, *(None,) * (num_rounds(num_logical, num_present) - 1))

    return [Swap(mesh, "rounds_of", rounds_of)]


def _apply_twice() -> list[Swap]:
    """Survivors take a step again whose update they have."""
    honest = recovery.agree

    def agree(*arguments: Any, **options: Any) -> recovery.Agreed:
        found, state = honest(*arguments, **options), arguments[1]
        if found.chosen is None:
            return found
        before = [one for one in state.boundaries if one.progress.step == found.chosen.step - 1]
        return replace(found, boundary=before[0] if before else found.boundary)

    return [Swap(rank, "agree", agree)]


def _stale_copies() -> list[Swap]:
    """Snapshots are signed anew, and have what the first one had."""
    honest = copies.Snapshots.write

    def write(self: copies.Snapshots, step: int, tensors: Any) -> None:
        if self.steps():
            self._words[step % copies.NUM_SLOTS] = step + 1
        else:
            honest(self, step, tensors)
            honest(self, step + 1, tensors)
            self._words[(step + 1) % copies.NUM_SLOTS] = 0

    return [Swap(copies.Snapshots, "write", write)]


BUGS: dict[str, Callable[[], list[Swap]]] = {
    "carry forgotten between rounds": _forget_carry,
    "logical replicas in the order of those present": _deal_in_blocks,
    "a dead replica's samples dropped": _drop_shares,
    "a step applied twice": _apply_twice,
    "a stale copy": _stale_copies,
}
"""By name; the last shows under ``zero``, where the run finds it by itself."""
