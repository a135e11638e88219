"""Rates and batches that adapt, written a second time for the one process that plans are compared with.

Nothing of ``optim/adapt.py`` or the engine is used: the rules stand here once more, in the order of their published formulas
(``docs/guides/adaptive-rates.md`` has the papers). The squares of microbatches' gradients come from passes of their own.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shoal.core.errors import RequestError
from shoal.optim.config import OptimConfig
from shoal.optim.norms import product_sums
from shoal.optim.rates import rate
from shoal.verify.reference.case import Case, Tree
from shoal.verify.reference.model import Ids, ReferenceModel, batch_loss, norm_of, weigh

_SLICE = 512
"""Elements whose squares are added in the tensor's own type before float64 takes over."""


class Adapting:
    """Follows ``optim.adapt``, ``optim.scale`` and ``train.batch_schedule`` through the steps of one process."""

    def __init__(self, parts: ReferenceModel) -> None:
        self._parts, self._case = parts, parts.case
        self._optim = OptimConfig.model_validate(dict(parts.case.optim))
        self._base = self._optim.scale_base or parts.case.global_batch
        self._level = 0
        self._square = self._variance = self._weight = self._progress = 0.0
        self._factor = self._lr = 1.0
        self._last: dict[str, Tensor] = {}
        self._before: dict[str, Tensor] = {}
        self._shares: list[tuple[float, float]] = []

    def batch(self, step: int) -> int:
        """Samples of a step."""
        return batch_of(self._case, step, self._level)

    def tree(self, step: int, tree: Tree) -> Tree:
        """The tree of a step: microbatches keep their size, so a larger batch has more of them."""
        return replace(tree, microbatches=tree.microbatches * self.batch(step) // self._case.global_batch)

    def look(self, step: int, groups: Sequence[Sequence[Ids]], scale: float) -> None:
        """Measure the microbatches of a step, by passes of their own, where the noise is measured."""
        self._shares = []
        if self._optim.adapt not in ("noise", "adascale") or step % self._optim.adapt_every:
            return
        parts = self._parts
        buffers = {name: buffer.detach().clone() for name, buffer in parts.model.named_buffers()}
        cuts = [cut for group in groups for cut in group if len(cut)]
        weights = [weigh(parts, cut) for cut in cuts]
        total = max(1.0, math.fsum(weights))
        for cut, weight in zip(cuts, weights, strict=True):
            parts.optimizer.zero_grad(set_to_none=True)
            value = batch_loss(parts, step, cut, total)
            (value if scale == 1.0 else value * scale).backward()  # type: ignore[no-untyped-call]
            squares = [_square(parameter.grad) for _, parameter in parts.named if parameter.grad is not None]
            if weight > 0:
                self._shares.append((float(torch.stack(squares).sum()) / scale**2, weight / total))
        parts.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, buffer in parts.model.named_buffers():
                buffer.copy_(buffers[name])

    def rate(self, step: int, gradients: Mapping[str, Tensor]) -> float:
        """The rate of a step whose gradient this is; sets the decay of the second moment too."""
        optim, batch, first = self._optim, self.batch(step), self._case.global_batch
        if optim.hold_half_life:
            for group in self._parts.optimizer.param_groups:
                group["betas"] = (group["betas"][0], optim.betas[1] ** (batch / self._base))
        growth = {"none": 1.0, "linear": batch / first, "sqrt": math.sqrt(batch / first)}[optim.scale]
        at = math.floor(self._progress) if optim.adapt == "adascale" else step
        base = rate(self._parts.optim, at, self._case.total_steps) * growth
        if optim.adapt == "adascale":
            base *= (
                self._gain(batch)
                if optim.name in ("sgd", "momentum", "nesterov", "lars")
                else math.sqrt(self._gain(batch))
            )
        elif optim.adapt == "hyper":
            self._follow(gradients)
            base *= self._factor
        self._lr = base
        return base

    def _gain(self, batch: int) -> float:
        if self._weight == 0:
            return 1.0
        square, variance = max(self._square / self._weight, 0.0), max(self._variance / self._weight, 1e-6)
        return (variance + square) / (variance / (batch / self._base) + square)

    def _follow(self, gradients: Mapping[str, Tensor]) -> None:
        """Hypergradient descent: by the cosine of this gradient and what the last step took off the weights."""
        self._kept_factor = self._factor
        names = [name for name, _ in self._parts.named if name in gradients]
        self._before = {name: parameter.detach().clone() for name, parameter in self._parts.named}
        if not self._last:
            return
        lengths = norm_of([gradients[name] for name in names]) * norm_of([self._last[name] for name in names])
        dots = [product_sums(gradients[name], self._last[name]).sum() for name in names]
        cosine = float(torch.stack(dots).sum()) / lengths if lengths else 0.0
        if math.isfinite(cosine):
            low, high = self._optim.adapt_bounds
            grown = self._factor * (1.0 + self._optim.adapt_step * min(max(cosine, -1.0), 1.0))
            self._factor = min(max(grown, low), high)

    def after(self, step: int, norm: float, *, is_taken: bool) -> None:
        """A step is over.

        Raises:
            RequestError: AdaScale has done the whole run's work before the proof is over.
        """
        if self._optim.adapt == "hyper":
            if not is_taken:
                self._factor = self._kept_factor
            with torch.no_grad():
                self._last = {name: self._before[name] - parameter for name, parameter in self._parts.named}
        if self._optim.adapt in ("noise", "adascale"):
            if is_taken:
                self._measure(self.batch(step), norm)
            self._grow(step + 1)
        if self._optim.adapt == "adascale" and step + 1 < self._case.steps and self._progress >= self._case.total_steps:
            raise RequestError(
                f"adascale has done the work of train.steps {self._case.total_steps} after {step + 1} steps, and the proof has "
                f"{self._case.steps}; raise train.steps, or prove --steps {step + 1}"
            )

    def _measure(self, batch: int, norm: float) -> None:
        self._progress += self._gain(batch)
        count, scale = len(self._shares), batch / self._base
        if count < 2:
            return
        small, large = math.fsum(square / weight for square, weight in self._shares), norm**2
        if not (math.isfinite(small) and math.isfinite(large)):
            return
        stays = (self._optim.adapt_smoothing**self._optim.adapt_every) ** scale
        self._square = stays * self._square + (1.0 - stays) * ((count * large - small) / (count - 1))
        self._variance = stays * self._variance + (1.0 - stays) * ((small - large) * scale / (count - 1))
        self._weight = stays * self._weight + (1.0 - stays)

    def _grow(self, steps: int) -> None:
        """Double the batch of "noise" where that is not above the noise scale."""
        case, square = self._case, 0.0 if self._weight == 0 else max(self._square / self._weight, 0.0)
        twice = 2 * batch_of(case, steps, self._level)
        limit = case.batch_limit or 16 * case.global_batch
        if case.batch_schedule != "noise" or steps % case.batch_every or square <= 0 or twice > limit:
            return
        if max(self._variance / self._weight, 1e-6) * self._base / square >= twice:
            self._level += 1

    def tensors(self) -> dict[str, Tensor]:
        """What a proof compares of it, by the names that ranks record it by; nothing where nothing adapts."""
        optim = self._optim
        if optim.adapt == "none" and optim.scale == "none" and self._case.batch_schedule is None:
            return {}
        found = {"rate": [self._lr]}
        if optim.adapt in ("noise", "adascale"):
            found |= {
                "averages": [self._square, self._variance],
                "progress": [self._weight, self._progress, self._level],
            }
        elif optim.adapt == "hyper":
            found["factor"] = [self._factor]
        return {
            f"optimizer/optim.adapt/{key}": torch.tensor(value, dtype=torch.float64) for key, value in found.items()
        }


def batch_of(case: Case, step: int, level: int = 0) -> int:
    """Samples of a step, counted from 0."""
    if case.batch_schedule is None or case.batch_schedule == "noise":
        return case.global_batch << level
    found = case.global_batch
    for first, batch in case.batch_schedule:
        if first <= step:
            found = int(batch)
    return found


def _square(gradient: Tensor) -> Tensor:
    """The float64 sum of squares of a gradient, from norms of short slices."""
    flat = gradient.detach().reshape(-1)
    end = flat.numel() // _SLICE * _SLICE
    norms = [torch.linalg.vector_norm(flat[:end].view(-1, _SLICE), dim=1)] if end else []
    if end < flat.numel():
        norms.append(torch.linalg.vector_norm(flat[end:]).reshape(1))
    return torch.cat(norms).double().square().sum()
