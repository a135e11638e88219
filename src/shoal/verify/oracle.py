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
    """Called with stage and microbatch when gradients are in place: clips, sets the rate."""
    _history: list[dict[str, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._parameters = dict(self.model.named_parameters())
        self._history.append(self._copy())

    def version(self, stage: int, update: int) -> int:
        """v_s for update t, stages counted from 0."""
        count = len(self.stages)
        behind = {Delay.STASHED: count - 1 - stage, Delay.VERTICAL: count - 1, Delay.BUFFERED: 1}[self.delay]
        return max(0, update - behind)

    def take(self, microbatches: Sequence[int]) -> Tensor:
        """Update number t on its microbatches (one, but for 2BW); the sum of their losses."""
        update = len(self._history) - 1
        mixed = {
            name: self._history[self.version(stage, update)][name].requires_grad_()
            for stage, names in enumerate(self.stages)
            for name in names
        }
        total = torch.zeros(())
        for microbatch in microbatches:
            loss = self.loss_of(lambda *inputs: functional_call(self.model, mixed, inputs), microbatch)
            loss.backward()  # type: ignore[no-untyped-call]
            total = total + loss.detach()
        for stage, names in enumerate(self.stages):
            for name in names:
                self._parameters[name].grad, mixed[name].grad = mixed[name].grad, None
            if self.before_update is not None:
                self.before_update(stage, microbatches[-1])
            self.optimizers[stage].step()
        self._history.append(self._copy())
        return total

    def gradients(self) -> Mapping[str, Tensor | None]:
        """Those of the last update."""
        return {name: parameter.grad for name, parameter in self._parameters.items()}

    def _copy(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
