"""What compressed sums keep in a checkpoint, and how a run goes on from it.

    compression/method/<kind>/<replicas>           which method it is of; holds the number of replicas
    compression/residual/<replica>/<parameter>     what a replica has not sent yet (dgc: momentum and unsent)
    compression/sum_residual/<parameter>           what the owners of the sum have not sent back yet, whole
    compression/right/<parameter>                  PowerSGD's Q

The same method and number of replicas go on to the bit. Of residuals only their sum matters to what is learned, so with another
number of replicas the first takes all of it. Another method drops them, and says so.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shoal.compression.exchange import CompressedSum
from shoal.core.compressrule import CompressRule
from shoal.core.placement import Placement, place_whole
from shoal.engine.state import RankState

PREFIX = "compression/"
_METHOD = f"{PREFIX}method/"


def method_of(rule: CompressRule) -> str:
    """What a rule's state is good for: any number of the same kind, but the factors of PowerSGD have the width of theirs."""
    return str(replace(rule, start=0)) if rule.kind == "powersgd" else rule.kind


def saved_method(saved: Collection[str]) -> tuple[str, int] | None:
    """The method and the number of replicas that a checkpoint's compressed sums are of; None where it has none."""
    for name in saved:
        if name.startswith(_METHOD):
            kind, _, replicas = name.removeprefix(_METHOD).partition("/")
            return kind, int(replicas)
    return None


def say_dropped(saved: Collection[str]) -> str | None:
    """What to say of a checkpoint with residuals, in a run that does not compress; None of one without."""
    found = saved_method(saved)
    if found is None:
        return None
    return (
        f"the checkpoint is of compress={found[0]}, and this plan compresses nothing: what was not sent yet is dropped"
    )


@dataclass(kw_only=True, eq=False)
class SavedSums:
    """The state of compressed sums by the names of checkpoints."""

    sums: CompressedSum
    saved_names: Mapping[str, str]
    """What checkpoints call each parameter."""
    _folded: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """What is added to live tensors once it is loaded."""
    _said: str | None = None

    def add_to(self, own: RankState) -> RankState:
        """A rank's state, with that of its compressed sums: live tensors."""
        tensors, placements = self._tensors()
        return replace(own, tensors={**own.tensors, **tensors}, placements={**own.placements, **placements})

    def to_load(self, own: RankState, saved: Collection[str]) -> RankState:
        """The tensors to be written, by the names that a checkpoint has for them."""
        self._folded, self._said = [], None
        known, found = set(saved), saved_method(saved)
        tensors = {name: one for name, one in own.tensors.items() if not name.startswith(PREFIX)}
        placements = {name: own.placements[name] for name in tensors}
        kind, num_ranks = method_of(self.sums.rule), self.sums.channel.size
        mine, places = self._tensors()
        if found is None or found[0] != kind:
            self.sums.reset()
            if found is not None:
                self._said = (
                    f"the checkpoint is of compress={found[0]}, and this plan has compress={self.sums.rule}: what was not sent "
                    f"yet is dropped"
                )
            return replace(own, tensors=tensors, placements=placements)
        if found[1] != num_ranks:
            self.sums.reset()
            mine, places = self._tensors()
            own_prefixes = tuple(f"{PREFIX}{what}/{self.sums.channel.rank}/" for what in self.sums.own_state())
            mine = {name: one for name, one in mine.items() if not name.startswith(own_prefixes)}
            if self.sums.channel.rank == 0:
                self._fold_replicas(found[1], known, tensors, placements)
            self._said = f"the checkpoint's residuals are of {found[1]} replicas, here are {num_ranks}: replica 0 takes their sum"
        ratios = [name for name in self.sums.numbers if name.startswith("ratio/") and f"{PREFIX}{name}" not in known]
        for name in ratios:
            self.sums.numbers[name].zero_()
        if ratios and self._said is None:
            self._said = (
                f"the checkpoint was written before 1-bit LAMB kept its coefficients: for {len(ratios)} tensors the trust ratio "
                "of the next step stands for those of the warm-up"
            )
        self._fold_sum_residual(known, tensors, placements)
        for name, tensor in mine.items():
            if name in known:
                tensors[name], placements[name] = tensor, places[name]
        return replace(own, tensors=tensors, placements=placements)

    @torch.no_grad()
    def loaded(self) -> str | None:
        """The checkpoint was read: add up what is to be added. Returns what to tell the user."""
        for target, part in self._folded:
            target.add_(part.view_as(target))
        self._folded = []
        return self._said

    def _fold_replicas(
        self, replicas: int, known: set[str], tensors: dict[str, Tensor], placements: dict[str, Placement]
    ) -> None:
        for what, by_name in self.sums.own_state().items():
            for name, live in by_name.items():
                for replica in range(replicas):
                    key = f"{PREFIX}{what}/{replica}/{self.saved_names[name]}"
                    if key in known:
                        self._read_beside(key, live, self.sums.parts[name].shape, tensors, placements)

    def _fold_sum_residual(self, known: set[str], tensors: dict[str, Tensor], placements: dict[str, Placement]) -> None:
        """Under ZeRO nobody sends a sum back, so what was left of it is the first replica's to send."""
        residuals = self.sums.own_state().get("residual", {})
        if "sum_residual" in self.sums.shared_state() or self.sums.channel.rank != 0:
            return
        for name, live in residuals.items():
            key = f"{PREFIX}sum_residual/{self.saved_names[name]}"
            if key in known:
                self._read_beside(key, live, (live.numel(),), tensors, placements)

    def _read_beside(
        self,
        key: str,
        live: Tensor,
        shape: tuple[int, ...],
        tensors: dict[str, Tensor],
        placements: dict[str, Placement],
    ) -> None:
        part = torch.empty(shape, dtype=live.dtype, device=live.device)
        tensors[key], placements[key] = part, place_whole(shape)
        self._folded.append((live, part))

    def _tensors(self) -> tuple[dict[str, Tensor], dict[str, Placement]]:
        rank, size = self.sums.channel.rank, self.sums.channel.size
        method = torch.tensor(size)
        tensors: dict[str, Tensor] = {f"{_METHOD}{method_of(self.sums.rule)}/{size}": method}
        tensors |= {f"{PREFIX}{name}": number for name, number in self.sums.numbers.items()}
        placements = {name: place_whole(number.shape) for name, number in tensors.items()}
        for what, by_name in self.sums.own_state().items():
            for name, tensor in by_name.items():
                key, shape = f"{PREFIX}{what}/{rank}/{self.saved_names[name]}", self.sums.parts[name].shape
                tensors[key], placements[key] = tensor.view(shape), place_whole(shape)
        for what, pieces in self.sums.shared_state().items():
            for name, (tensor, start, rows) in pieces.items():
                key = f"{PREFIX}{what}/{self.saved_names[name]}"
                whole = place_whole((rows, *tensor.shape[1:]))
                tensors[key], placements[key] = tensor, whole.rows(start, start + tensor.shape[0])
        return tensors, placements
