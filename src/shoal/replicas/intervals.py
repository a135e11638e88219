"""When a round of the whole model is due, where that is not every H steps: by the rate, or by the loss.

    qsr       H = max(H_0, floor((a / lr)^2))     Gu et al. 2024, arXiv 2310.14423, equation 2
    adacomm   H = ceil(H_0 sqrt(F / F_0))         Wang and Joshi 2019, arXiv 1810.08313

The lr of qsr is that of the first step of a round, and H holds until the round ends, however far the rate falls meanwhile. The
rule is for rates that fall; the rounds of warm-up are H_0 steps long (its authors' program gives them an H of their own). A round
is one of warm-up when the rate rises in it, which needs no knowledge of the schedule: a script may bring its own.

F is the validation loss of the last evaluation and F_0 that of the first: rounds come closer as it falls. The rules are pure;
what they remember is two numbers, which a checkpoint keeps.
"""

import math

import torch
from torch import Tensor

from shoal.core.syncrule import SyncRule
from shoal.replicas.config import ReplicaConfig


def qsr_interval(period: int, lr: float, scale: float) -> int:
    """Steps between rounds by the quadratic rule."""
    return max(period, math.floor((scale / max(lr, 1e-12)) ** 2))


def adacomm_interval(period: int, first: float, now: float) -> int:
    """Steps between rounds by the loss: fewer as it falls, and at least one."""
    if not (math.isfinite(first) and math.isfinite(now) and first > 0 and now > 0):
        return period
    return max(1, math.ceil(period * math.sqrt(now / first)))


class Interval:
    """Whether a round is due after a step, by the plan's rule and the recipe's ``replicas.interval``."""

    def __init__(self, rule: SyncRule, config: ReplicaConfig) -> None:
        self._rule, self._config = rule, config
        self._losses = torch.full((2,), math.nan, dtype=torch.float64)
        """F_0 and F; NaN before there was an evaluation."""
        self._pace = torch.zeros(2, dtype=torch.float64)
        """Of qsr: H of the round that is under way, and the rate that it began with; zeros before there was a step."""

    def is_due(self, step: int, *, lr: float, since: int) -> bool:
        """True when a round is due after step number ``step``, with rate ``lr``, ``since`` steps after the last one."""
        match self._config.interval:
            case "qsr":
                return since >= self._follow_rate(lr, since)
            case "adacomm":
                first, now = self._losses.tolist()
                return since >= adacomm_interval(self._rule.period, first, now)
            case _:
                return self._rule.is_round(step)

    def _follow_rate(self, lr: float, since: int) -> float:
        """H of the round that is under way, after its step number ``since``."""
        interval, first = self._pace.tolist()
        if since == 1 or interval == 0:
            interval, first = qsr_interval(self._rule.period, lr, self._config.interval_scale), lr
        elif lr > first:
            interval = self._rule.period
        self._pace.copy_(torch.tensor([interval, first], dtype=torch.float64))
        return float(interval)

    @property
    def follows_losses(self) -> bool:
        """Evaluations decide when rounds are held."""
        return self._config.interval == "adacomm"

    @property
    def is_fixed(self) -> bool:
        """Rounds are every H steps."""
        return self._config.interval == "fixed"

    def evaluated(self, loss: float) -> None:
        """Learn the loss of an evaluation, which all ranks have alike; one that is not finite says nothing."""
        if math.isfinite(loss):
            if math.isnan(float(self._losses[0])):
                self._losses[0] = loss
            self._losses[1] = loss

    def restart(self) -> None:
        """Forget the losses and the pace."""
        self._losses.fill_(math.nan)
        self._pace.zero_()

    def numbers(self) -> dict[str, Tensor]:
        """What a checkpoint keeps: live."""
        match self._config.interval:
            case "qsr":
                return {"pace": self._pace}
            case "adacomm":
                return {"losses": self._losses}
            case _:
                return {}
