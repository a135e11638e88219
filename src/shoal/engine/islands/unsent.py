"""What compressed sums between islands have not sent, in checkpoints.

    PREFIX/<island>/compress-<method>/residual/<parameter>        what an island has not sent yet
    PREFIX/shared/compress-<method>/sum_residual/<parameter>      what the owners of a sum have not sent back yet
    PREFIX/shared/compress-<method>/right/<parameter>             PowerSGD's Q

All are saved by their elements' places in the whole parameter, so that islands which are cut otherwise inside go on from them.
With another number of islands, or another policy that takes the mean of changes, the first island takes all that was not sent,
times the new number over the old one: a round divides by their number, so the mean of what is still to come stays what it was.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.compression.exchange import CompressedSum
from shoal.core.placement import Placement, place_whole
from shoal.engine.compression.saved import method_of

Located = dict[str, tuple[Tensor, Placement]]
"""Live tensors by what a checkpoint calls them, and where they lie in what it has."""


@dataclass(kw_only=True, eq=False)
class Unsent:
    """The state of one rank's compressed sums by the names of checkpoints."""

    sums: CompressedSum
    saved_names: Mapping[str, str]
    """What checkpoints call each parameter."""
    _folded: list[tuple[str, Tensor, float]] = field(default_factory=list, init=False)
    """What is added to residuals once it is loaded: parameter, tensor and factor."""

    @property
    def _method(self) -> str:
        return f"compress-{method_of(self.sums.rule)}"

    def named(self, prefix: str, *, is_read: bool) -> Located:
        """What is saved or read of this rank's sums.

        Args:
            prefix: of the policy and the number of islands.
            is_read: to be read, with the elements that make blocks whole; each is saved by the rank that holds it.
        """
        found: Located = {}
        for what, by_name in self.sums.own_state().items():
            for name, flat in by_name.items():
                key = f"{prefix}{self.sums.channel.rank}/{self._method}/{what}/{self.saved_names[name]}"
                self._place(found, key, name, flat, 0, is_read=is_read)
        for what, pieces in self.sums.shared_state().items():
            for name, (tensor, start, _) in pieces.items():
                key = f"{prefix}shared/{self._method}/{what}/{self.saved_names[name]}"
                if what == "right":
                    found[key] = tensor, place_whole(tensor.shape)
                else:
                    self._place(found, key, name, tensor, start, is_read=is_read)
        return found

    def _place(self, found: Located, key: str, name: str, flat: Tensor, start: int, *, is_read: bool) -> None:
        """Add elements of a parameter, the first of which is number ``start`` of what this rank codes of it."""
        part = self.sums.parts[name]
        first, stop = start, start + flat.numel()
        if not is_read:
            first, stop = max(first, part.before), min(stop, part.size - part.behind)
        if first < stop:
            whole = place_whole((math.prod(part.shape),))
            found[key] = flat[first - start : stop - start], whole.rows(part.offset + first, part.offset + stop)

    def fold(self, saved: Collection[str], prefix: str) -> Located:
        """What is to be read of a checkpoint of another number of islands or another policy, and added up by ``loaded``."""
        self._folded = []
        residuals = self.sums.own_state().get("residual", {})
        of = _saved_counts(saved, prefix, f"/{self._method}/")
        found: Located = {}
        if len(of) != 1 or self.sums.channel.rank != 0:
            return found
        ((policy, count),) = of.items()
        for name, flat in residuals.items():
            for where, what in (*((str(one), "residual") for one in range(count)), ("shared", "sum_residual")):
                key = f"{policy}{where}/{self._method}/{what}/{self.saved_names[name]}"
                if key in saved:
                    part = torch.empty_like(flat)
                    self._place(found, key, name, part, 0, is_read=True)
                    self._folded.append((name, part, self.sums.channel.size / count))
        return found

    @torch.no_grad()
    def loaded(self) -> str | None:
        """The checkpoint was read: begin anew, with what is left of it. Returns what to tell the user."""
        self.sums.reset()
        residuals = self.sums.own_state().get("residual", {})
        for name, part, factor in self._folded:
            residuals[name].add_(part, alpha=factor)
        has_some, self._folded = bool(self._folded), []
        return "what its islands had not sent is the first island's to send" if has_some else None


def _saved_counts(saved: Collection[str], prefix: str, method: str) -> dict[str, int]:
    """The numbers of islands that a checkpoint has residuals of this method for, by the beginning of their names."""
    root = prefix.partition("/")[0]
    found: dict[str, int] = {}
    for name in saved:
        if name.startswith(f"{root}/") and method in name:
            _, kind, count, _ = name.split("/", 3)
            found[f"{root}/{kind}/{count}/"] = int(count)
    return found
