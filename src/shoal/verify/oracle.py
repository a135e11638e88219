"""What asynchronous pipelines should compute, by the papers' rules, in one process and without ``pipeline/`` or ``schedules/``.

With n stages, w_s(t) the weights of stage s after t updates and microbatches b = 0, 1, ..., every stage s does

    w_s(t+1) = w_s(t) - rate * d/dw_s f_b(w_1(v_1), ..., w_n(v_n))          one update per microbatch, t = b

    weight stashing   v_s = t - (n - s)     a stage at distance n - s from the end is that many updates behind, stage 1 the most
    vertical sync     v_s = t - (n - 1)     all stages are as far behind as the first
    2BW               v_s = t - 1           one update per step, of the sum over its microbatches; one version behind

with v_s not below 0 (PipeDream, SOSP 2019, section 3.3 and 3.4; 2BW, ICML 2021, section 3.1). "- rate * gradient" stands for
whatever the optimizer does. The whole model runs at once, each stage's weights taken from its own version, so no order of
events can be wrong.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch import Tensor, nn
from torch.func import functional_call


class Delay(StrEnum):
    """Which weights a microbatch meets."""

    STASHED = "pipedream"
    VERTICAL = "pipedream-vsync"
    BUFFERED = "pipedream-2bw"


@dataclass
class Oracle:
    """Trains a model by a delayed rule.

    Args:
        model: whole; its parameters are the newest weights.
        stages: parameter names of each stage, first stage first.
        delay: the rule.
        optimizers: one per stage, over its parameters, made before the first step.
        loss_of: runs the model with the given weights on a microbatch and gives its share of the loss.
    """

    model: nn.Module
    stages: Sequence[Sequence[str]]
    delay: Delay
    optimizers: Sequence[torch.optim.Optimizer]
    loss_of: Callable[[Callable[..., object], int], Tensor]
    before_update: Callable[[int, int], None] | None = None
    """Called with stage and update when gradients are in place: clips, sets the rate."""
    _count: int = 0
    """Updates so far."""
    _history: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """Weights by the number of updates that made them; those that no later update will ask for are gone."""

    def __post_init__(self) -> None:
        self._parameters = dict(self.model.named_parameters())
        self._history[0] = self._copy()

    def version(self, stage: int, update: int) -> int:
        """v_s for update t, stages counted from 0."""
        count = len(self.stages)
        behind = {Delay.STASHED: count - 1 - stage, Delay.VERTICAL: count - 1, Delay.BUFFERED: 1}[self.delay]
        return max(0, update - behind)

    def take(self, *replicas: Sequence[int]) -> Tensor:
        """Update number t on the microbatches of each replica (one, but for 2BW); the sum of their losses.

        A replica's microbatches are added in order, then replicas. Where nobody has a microbatch the gradient is zero.
        """
        mixed = {
            name: self._history[self.version(stage, self._count)][name].requires_grad_()
            for stage, names in enumerate(self.stages)
            for name in names
        }
        total, gradients = self._add_up(mixed, replicas[0])
        for microbatches in replicas[1:]:
            loss, own = self._add_up(mixed, microbatches)
            total, gradients = total + loss, {name: gradients[name] + own[name] for name in gradients}
        for stage, names in enumerate(self.stages):
            for name in names:
                self._parameters[name].grad = gradients[name]
            if self.before_update is not None:
                self.before_update(stage, self._count)
            self.optimizers[stage].step()
        self._count += 1
        self._history[self._count] = self._copy()
        oldest = min(self.version(stage, self._count) for stage in range(len(self.stages)))
        self._history = {version: weights for version, weights in self._history.items() if version >= oldest}
        return total

    def gradients(self) -> Mapping[str, Tensor | None]:
        """Those of the last update."""
        return {name: parameter.grad for name, parameter in self._parameters.items()}

    def _add_up(self, mixed: Mapping[str, Tensor], microbatches: Sequence[int]) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and gradients of one replica."""
        total = torch.zeros(())
        for microbatch in microbatches:
            loss = self.loss_of(lambda *inputs: functional_call(self.model, dict(mixed), inputs), microbatch)
            loss.backward()  # type: ignore[no-untyped-call]
            total = total + loss.detach()
        found: dict[str, Tensor] = {}
        for name, weight in mixed.items():
            found[name] = torch.zeros_like(weight) if weight.grad is None else weight.grad
            weight.grad = None
        return total, found

    def _copy(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
