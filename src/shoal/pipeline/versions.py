"""Versions of one rank's weights: which of them a microbatch computes with, kept for as long as one will.

A version is a set of tensors that nobody writes to. Forward and backward passes read it through ``torch.func.functional_call``:
weights that are swapped in place raise in autograd or, where they do not, give gradients of the wrong weights. The parameters
themselves are the newest version and belong to the optimizer; a copy is made when a pass needs one.

The rules count microbatches from the beginning of training, so a pipeline that was drained and filled again, for a
checkpoint or an evaluation, goes on with the versions that it would have had without the pause.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from shoal.schedules.schedule import Updates


@dataclass(frozen=True, kw_only=True)
class VersionRule:
    """The version that a stage uses for a microbatch, and when a new one is made."""

    updates: Updates
    num_stages: int
    accumulate: int = 1

    def used(self, stage: int, microbatch: int) -> int:
        """The version for a microbatch, counted from the beginning of training."""
        if self.updates is Updates.STASHED:
            # What is between this stage and the end of the pipeline has not come back yet.
            return max(0, microbatch - (self.num_stages - 1 - stage))
        if self.updates is Updates.VERTICAL:
            return max(0, microbatch - (self.num_stages - 1))
        assert self.updates is Updates.BUFFERED
        return max(0, microbatch // self.accumulate - 1)

    def ends_version(self, microbatch: int) -> bool:
        """True when weights change after this microbatch's backward pass."""
        return (microbatch + 1) % self.accumulate == 0


class Versions:
    """The weights of one stage through time."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], rule: VersionRule, *, stage: int) -> None:
        self.parameters = parameters
        self.rule = rule
        self.stage = stage
        # On the last stage of a stashing pipeline every backward pass follows its forward pass: there is nothing to stash.
        self._reads_newest = rule.updates is Updates.STASHED and stage == rule.num_stages - 1
        self.newest = 0
        self.sets: dict[int, dict[str, Tensor]] = {}
        """Copies by version; only of those that a microbatch uses or will use."""

    def use(self, microbatch: int) -> Mapping[str, Tensor] | None:
        """The weights for a microbatch, by parameter name; None for the parameters themselves."""
        if self._reads_newest:
            return None
        version = self.rule.used(self.stage, microbatch)
        if version == self.newest:
            self._keep_newest()
        return self.sets[version]

    def take_gradients(self, microbatch: int) -> None:
        """Put what a backward pass left at its version where the optimizer looks for it."""
        if self._reads_newest:
            return
        for name, tensor in self.sets[self.rule.used(self.stage, microbatch)].items():
            self.parameters[name].grad, tensor.grad = tensor.grad, None

    def before_update(self, microbatch: int) -> None:
        """Keep the newest version if a later microbatch will use it; call it before the optimizer writes."""
        if any(self.rule.used(self.stage, later) == self.newest for later in self._later(microbatch)):
            self._keep_newest()

    def after_update(self, microbatch: int) -> None:
        """A new version is there; those that nobody will use any more are let go."""
        self.newest += 1
        for parameter in self.parameters.values():
            parameter.grad = None
        # Versions are used in the order of microbatches, so the next one needs the oldest.
        oldest = self.rule.used(self.stage, microbatch + 1)
        for version in [version for version in self.sets if version < oldest]:
            del self.sets[version]

    def newest_at(self, microbatches: int) -> int:
        """The newest version after so many microbatches."""
        return microbatches // self.rule.accumulate

    def wanted(self, microbatches: int) -> list[int]:
        """The versions, but for the newest, that microbatches from this number on will use."""
        newest = self.newest_at(microbatches)
        used = {self.rule.used(self.stage, later) for later in self._later(microbatches - 1)}
        return sorted(version for version in used if version < newest)

    def begin_at(self, microbatches: int) -> None:
        """Go on after so many microbatches; copies of the versions that are wanted exist and wait to be written to."""
        self.newest = self.newest_at(microbatches)
        self.sets = {version: self._copy() for version in self.wanted(microbatches)}

    def _copy(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone().requires_grad_() for name, parameter in self.parameters.items()}

    def _later(self, microbatch: int) -> range:
        return range(microbatch + 1, microbatch + 1 + 2 * max(self.rule.num_stages, self.rule.accumulate))

    def _keep_newest(self) -> None:
        if self.newest not in self.sets:
            self.sets[self.newest] = self._copy()
            assert all(tensor.is_leaf for tensor in self.sets[self.newest].values())
