"""1-bit Adam (Tang et al. 2021): from a step on, replicas send signs of their momenta in place of gradients.

Until then sums are dense and the optimizer is the plain one. At that step the variance is frozen, with Adam's own correction for
its start, so that the step lengths go on as they were; each replica moves the momentum that all agree on with its own gradient,
and the sum of these is sent as scaled signs with error feedback on both legs.

1-bit LAMB (Li et al. 2021, algorithm 1) has no trust ratios from then on, which signs would disturb: a tensor's steps are scaled
by the mean of its ratios of the warm-up, times a factor that follows how its variance has changed since. The mean forgets a tenth
a step and is corrected for its start.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from shoal.compression.exchange import CompressedSum
from shoal.compression.onebit import lamb_factor, move, rebuild_gradient
from shoal.optim.layerwise import Lamb, trust_ratios
from shoal.parallel.compressed import CompressedGradients

RATIO_KEPT = 0.9
"""Of the mean trust ratio, at each step of the warm-up (Li et al. 2021, section 4: beta 3)."""


class MomentumSums(CompressedGradients):
    """Sums of momenta: after a compressed step ``.grad`` holds the momentum that all replicas agree on."""

    def __init__(self, sums: CompressedSum, *, clip: float | None, allows_untouched: bool) -> None:
        super().__init__(sums, clip=clip, allows_untouched=allows_untouched)
        self.frozen_at = torch.zeros((), dtype=torch.int64)
        """Updates that were taken when the variance was frozen; 0 before."""
        sums.numbers["frozen_at"] = self.frozen_at
        self._optimizer: Optimizer | None = None
        self._names: dict[str, nn.Parameter] = {}
        self._name_of: dict[int, str] = {}
        """The name of a parameter by its id."""
        self._beta1: dict[str, float] = {}

    def attach(self, optimizer: Optimizer, updated: Mapping[str, nn.Parameter]) -> None:
        """Say whose momenta are summed."""
        self._optimizer, self._names = optimizer, dict(updated)
        self._name_of = {id(parameter): name for name, parameter in updated.items()}
        by_parameter = {id(one): group["betas"][0] for group in optimizer.param_groups for one in group["params"]}
        self._beta1 = {name: by_parameter[id(parameter)] for name, parameter in updated.items()}
        if isinstance(optimizer, Lamb):
            for name, parameter in updated.items():
                self.sums.numbers[f"ratio/{name}"] = torch.zeros((), dtype=torch.float64)
                self.sums.numbers[f"factor/{name}"] = torch.zeros((), dtype=torch.float64)
                self.sums.numbers[f"variance/{name}"] = torch.zeros_like(parameter)
            optimizer.hears_ratios = self._hear

    def _hear(self, weights: Sequence[Tensor], ratios: Sequence[Tensor]) -> None:
        """LAMB has taken a step of the warm-up by these trust ratios."""
        for weight, ratio in zip(weights, ratios, strict=True):
            mean = self.sums.numbers[f"ratio/{self._name_of[id(weight)]}"]
            mean.mul_(RATIO_KEPT).add_((1 - RATIO_KEPT) * float(ratio))

    @torch.no_grad()
    def reduce_(self, gradients: Mapping[str, Tensor]) -> None:
        """Replace gradients by their sums, or at a compressed step by the momentum that replicas agree on."""
        if not self.is_compressed:
            super().reduce_(gradients)
            return
        self.clip_own_(gradients)
        num_ranks, signed = self.sums.channel.size, self.sums.compressed
        for name, gradient in gradients.items():
            if name in signed:
                gradient.copy_(move(self._momentum(name), gradient * num_ranks, self._beta1[name]))
        self.sums.reduce_(gradients)
        for name, total in gradients.items():
            if name in signed:
                total.div_(num_ranks)
            else:
                total.copy_(move(self._momentum(name), total, self._beta1[name]))

    def _momentum(self, name: str) -> Tensor:
        assert self._optimizer is not None, "attach() comes first"
        return cast(Tensor, self._optimizer.state[self._names[name]]["exp_avg"])

    @torch.no_grad()
    def update(self, optimizer: Optimizer) -> None:
        """A step of the optimizer with the frozen variance, from the momenta in ``.grad``."""
        counts = [optimizer.state[one]["step"] for group in optimizer.param_groups for one in group["params"]]
        is_first = not int(self.frozen_at)
        if counts and is_first:
            self.frozen_at.fill_(int(counts[0]))
        # Checkpoints of releases before have no ratios, and a mean of nothing would end every step where it began.
        lacks_ratios = is_first or self._lacks_ratios(optimizer)
        for group in optimizer.param_groups:
            names = group.get("param_names") or [str(place) for place in range(len(group["params"]))]
            held = [(name, one) for name, one in zip(names, group["params"], strict=True) if one.grad is not None]
            directions = [self._direction(group, one, optimizer.state[one]) for _, one in held]
            if isinstance(optimizer, Lamb):
                self._scale_(optimizer, group, held, directions, lacks_ratios=lacks_ratios)
            for (_, weight), direction in zip(held, directions, strict=True):
                if isinstance(optimizer, AdamW) and group["weight_decay"]:
                    weight.mul_(1 - float(group["lr"]) * group["weight_decay"])
                weight.sub_(direction.mul_(float(group["lr"])))

    def _direction(self, group: dict[str, Any], weight: Tensor, state: dict[str, Tensor]) -> Tensor:
        """Where Adam goes with this momentum: one operation at a time, each of which rounds once."""
        beta1, beta2 = group["betas"]
        assert weight.grad is not None
        state["step"] += 1
        if isinstance(self._optimizer, Lamb):
            self._follow_variance(group, weight, state)
        state["exp_avg"].copy_(weight.grad)
        scale = state["exp_avg_sq"].sqrt().div_(math.sqrt(1 - beta2 ** int(self.frozen_at))).add_(group["eps"])
        corrected: Tensor = state["exp_avg"] / (1 - beta1 ** int(state["step"]))
        return corrected.div_(scale)

    def _follow_variance(self, group: dict[str, Any], weight: Tensor, state: dict[str, Tensor]) -> None:
        """Move the variance that is not frozen by the gradient which the agreed momenta imply, and the factor with it."""
        name, (beta1, beta2) = self._name_of[id(weight)], group["betas"]
        assert weight.grad is not None
        fresh, factor = self.sums.numbers[f"variance/{name}"], self.sums.numbers[f"factor/{name}"]
        if not float(factor):
            fresh.copy_(state["exp_avg_sq"])
            factor.fill_(1.0)
        gradient = rebuild_gradient(state["exp_avg"], weight.grad, beta1)
        fresh.mul_(beta2).add_(gradient.mul_(gradient).mul_(1 - beta2))
        factor.fill_(lamb_factor(state["exp_avg_sq"], fresh, float(factor)))

    def _scale_(
        self,
        optimizer: Lamb,
        group: dict[str, Any],
        held: list[tuple[str, nn.Parameter]],
        directions: list[Tensor],
        *,
        lacks_ratios: bool,
    ) -> None:
        """LAMB's decay, and the coefficient that was frozen with the variance times its factor, in place."""
        if group["weight_decay"]:
            for (_, weight), direction in zip(held, directions, strict=True):
                direction.add_(weight * group["weight_decay"])
        if not group["adapt"]:
            return
        started = 1 - RATIO_KEPT ** int(self.frozen_at)
        if lacks_ratios:
            self._fill_ratios(optimizer, held, directions, started)
        for (_, weight), direction in zip(held, directions, strict=True):
            name = self._name_of[id(weight)]
            mean, factor = (float(self.sums.numbers[f"{what}/{name}"]) for what in ("ratio", "factor"))
            direction.mul_(mean / started * factor)

    def _lacks_ratios(self, optimizer: Optimizer) -> bool:
        """Whether a mean trust ratio that steps are scaled by is none: the same on all ranks."""
        if not isinstance(optimizer, Lamb):
            return False
        scaled = [one for group in optimizer.param_groups if group["adapt"] for one in group["params"]]
        return any(not float(self.sums.numbers[f"ratio/{self._name_of[id(one)]}"]) for one in scaled)

    def _fill_ratios(
        self, optimizer: Lamb, held: list[tuple[str, nn.Parameter]], directions: list[Tensor], started: float
    ) -> None:
        """The first ratio stands for those of a warm-up that was another plan's, or that a checkpoint lacks.

        All ranks call it: norms may be collective.
        """
        names, weights = [name for name, _ in held], [weight.detach() for _, weight in held]
        norms = (optimizer.norms(names, weights), optimizer.norms(names, directions))
        for (_, weight), ratio in zip(held, trust_ratios(*norms, torch.float32) if held else (), strict=True):
            mean = self.sums.numbers[f"ratio/{self._name_of[id(weight)]}"]
            if not float(mean):
                mean.fill_(float(ratio) * started)
