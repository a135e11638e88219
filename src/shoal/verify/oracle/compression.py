"""One process that plays all replicas of a plan whose gradients, or weights, go between them compressed, by the papers' rules.

Every replica has a gradient of its own, added in the plan's tree; ``sums.py`` has what each sends and remembers, and what the sum
of it is. What replicas remember is recorded as optimizer state is, ``optimizer/TENSOR/residual-R``, so that a proof names the
first replica whose memory is wrong.

1-bit Adam (Tang et al. 2021, algorithm 1) sends no gradients: from its first compressed step on the variance stays as it is, each
replica moves the momentum by its own gradient, and the mean of the signs that are sent is everyone's momentum. Both moments keep
Adam's corrections of bias, that of the variance as it was when it froze. 1-bit LAMB (Li et al. 2021, algorithm 1) goes the same
way by frozen coefficients: the mean of a tensor's trust ratios in the warm-up, times r = max sqrt(v frozen / v fresh), where the
fresh variance follows g = (m - b1 m before) / (1 - b1); r stays within 0.5 and 4 and moves by a tenth at most.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.core.compressrule import CompressRule
from shoal.optim.build import set_rate
from shoal.optim.rates import rate
from shoal.verify.oracle.coded_weights import reading_coded
from shoal.verify.oracle.sums import CompressedSums
from shoal.verify.reference.case import Case, Tree
from shoal.verify.reference.model import (
    ReferenceModel,
    assert_alone,
    build_reference,
    global_batches,
    measure_movement,
    norm_of,
    refuse_not_finite,
)
from shoal.verify.reference.recording import Recorder, model_tensors, saved_buffers
from shoal.verify.reference.train import (
    add_replicas,
    apply_update,
    flat_gradients,
    narrow_weights,
    relative_distance,
    replica_gradients,
)

Gradients = dict[str, Tensor]
_RATIO_KEPT = 0.9


def run_compressed(case: Case, tree: Tree, folder: Path) -> dict[str, Any]:
    """Train ``case.steps`` steps and record each in ``folder``, as ``run_reference`` does.

    Raises:
        RequestError: the model draws random numbers of its own, or a loss is not finite even here.
    """
    parts = build_reference(case)
    training = CompressedTraining(parts, tree)
    recorder, flat_errors = Recorder(folder, "reference"), []
    scale = parts.precision.first_loss_scale
    initial = {name: parameter.detach().clone() for name, parameter in parts.named}
    for step, ids in enumerate(global_batches(parts)):
        set_rate(parts.optimizer, rate(parts.optim, step, case.total_steps))
        with reading_coded(parts, tree.compression):
            flat = None if parts.has_batch_norm else flat_gradients(parts, step, ids, scale.scale)
            replicas = replica_gradients(parts, step, ids, tree, scale.scale)
        loss, dense = add_replicas(replicas)
        if flat is not None:
            flat_errors.append(relative_distance(dense, flat))
        gradients = training.sum(step, [own for _, own in replicas])
        norm = norm_of([gradients[name] for name in sorted(gradients)]) / scale.scale
        finite = math.isfinite(norm) and math.isfinite(loss)
        if not (parts.precision.scales_loss and math.isfinite(loss)):
            refuse_not_finite(loss, norm, step)
        captured = {f"grad/{name}": grad / scale.scale for name, grad in gradients.items()} if finite else {}
        training.update(step, gradients, norm, scale.scale, is_taken=finite)
        captured |= model_tensors(parts.named, parts.optimizer, saved_buffers(parts.model))
        captured |= training.memory()
        recorder.add(loss=loss, norm=norm, skipped=not finite, tensors=captured)
        scale = scale.after_step(finite) if parts.precision.scales_loss else scale
    flat_error = max(flat_errors, default=None)
    recorder.close(flat=flat_error, movement=measure_movement(parts, initial), narrow=narrow_weights(parts, tree))
    assert_alone()
    return {"flat": flat_error}


class CompressedTraining:
    """A model, and the sums of its replicas' gradients."""

    def __init__(self, parts: ReferenceModel, tree: Tree) -> None:
        assert tree.delay is None and tree.islands == 1
        self._parts, self._count = parts, tree.replicas
        self._is_compressed = tree.compress is not None
        # What goes as it is goes by any rule that never begins.
        self._rule = CompressRule.parse(tree.compress or f"int8@{parts.case.steps}")
        self._sums = CompressedSums(
            self._rule,
            tree.compression,
            {name: tuple(parameter.shape) for name, parameter in parts.named},
            seed=parts.case.seed,
            num_ranks=tree.replicas,
            has_way_back=not tree.keeps_shards,
        )
        self._frozen_after: dict[str, int] = {}
        """Of 1-bit Adam: updates that a parameter's variance had when it froze."""
        self._mean_ratio: dict[str, float] = {}
        self._fresh: dict[str, tuple[Tensor, float]] = {}
        """Of 1-bit LAMB: mean trust ratios of the warm-up; and the variances that go on, with their factors."""

    def sum(self, step: int, replicas: Sequence[Mapping[str, Tensor]]) -> Gradients:
        """What all replicas take for the sum of their gradients; under 1-bit Adam, for everyone's momentum."""
        if not self._sums.is_compressed(step):
            return self._sums.sum(step, replicas)
        if self._rule.kind in ("dgc", "onebit"):
            replicas = [self._clipped(own) for own in replicas]
        return (
            self._agree_on_momentum(step, replicas) if self._rule.kind == "onebit" else self._sums.sum(step, replicas)
        )

    def update(self, step: int, gradients: Gradients, norm: float, scale: float, *, is_taken: bool) -> None:
        """The step by a sum; one that is not taken leaves everything, what is remembered too, as it was."""
        if not is_taken:
            self._sums.forget()
            return
        self._sums.commit()
        is_compressed = self._sums.is_compressed(step)
        if self._rule.kind == "onebit" and is_compressed:
            self._step_by_momentum(gradients)
        elif self._rule.kind == "dgc" and is_compressed:
            # Each replica was clipped by itself (Lin et al. 2018, section 3.2).
            apply_update(self._parts, gradients, 0.0, scale)
        else:
            before = {name: weight.detach().clone() for name, weight in self._parts.named}
            apply_update(self._parts, gradients, norm, scale)
            if self._rule.kind == "onebit" and self._parts.optim.name == "lamb":
                self._note_ratios(before)

    @torch.no_grad()
    def _note_ratios(self, before: Mapping[str, Tensor]) -> None:
        """The trust ratios of the step that was just taken, from the moments that it left."""
        names = {parameter: name for name, parameter in self._parts.named}
        for group in self._parts.optimizer.param_groups:
            for weight in group["params"] if group["adapt"] else ():
                moments, old = self._parts.optimizer.state[weight], before[names[weight]]
                keeps, keeps_squares = (1 - beta ** int(moments["step"]) for beta in group["betas"])
                size = moments["exp_avg_sq"].sqrt() / math.sqrt(keeps_squares) + group["eps"]
                way = moments["exp_avg"] / keeps / size
                way = way + group["weight_decay"] * old if group["weight_decay"] else way
                length, own = norm_of([old]), norm_of([way])
                ratio = float(torch.tensor(length / own if length > 0 and own > 0 else 1.0, dtype=torch.float32))
                mean = self._mean_ratio.get(names[weight], 0.0)
                self._mean_ratio[names[weight]] = mean * _RATIO_KEPT + (1 - _RATIO_KEPT) * ratio

    def _coefficient(
        self, name: str, moments: Mapping[str, Any], momentum: Tensor, betas: tuple[float, float]
    ) -> float:
        """Of a step of 1-bit LAMB, of whose momentum the state still has the one before."""
        keeps, keeps_squares = betas
        fresh, factor = self._fresh.get(name, (moments["exp_avg_sq"], 1.0))
        gradient = (momentum - moments["exp_avg"] * keeps) / (1 - keeps)
        fresh = fresh * keeps_squares + gradient * gradient * (1 - keeps_squares)
        ratio = float((moments["exp_avg_sq"].sqrt() / fresh.sqrt().clamp(min=2.0**-126)).max())
        factor = min(max(min(max(ratio, 0.5), 4.0), factor * (1 - 0.1)), factor * (1 + 0.1))
        self._fresh[name] = fresh, factor
        started = 1.0 - float(_RATIO_KEPT ** self._frozen_after[name])
        scale: float = self._mean_ratio.get(name, 0.0) / started * factor
        return scale

    def memory(self) -> dict[str, Tensor]:
        """What replicas remember, by the names that captures use."""
        found = self._sums.memory() if self._is_compressed else {}
        return {f"optimizer/{key}": value for key, value in found.items()}

    def _clipped(self, own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """A replica's gradient, no longer than its part of a sum of independent ones may be."""
        if self._parts.optim.clip is None:
            return own
        limit, norm = self._parts.optim.clip / math.sqrt(self._count), norm_of([own[name] for name in sorted(own)])
        return {name: grad * (limit / norm) for name, grad in own.items()} if norm > limit else own

    def _moments(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self._parts.optimizer.state[dict(self._parts.named)[name]]
        return found

    def _agree_on_momentum(self, step: int, replicas: Sequence[Mapping[str, Tensor]]) -> Gradients:
        keeps = self._parts.optim.betas[0]
        before = {name: self._moments(name)["exp_avg"] for name in replicas[0]}
        own = [
            # A replica's share of the mean, times their number, is the mean of its own samples.
            {
                name: _moved(before[name], grad * self._count, keeps)
                for name, grad in given.items()
                if name in self._sums.names
            }
            for given in replicas
        ]
        found = {name: total / self._count for name, total in self._sums.sum(step, own).items()}
        small = [{name: grad for name, grad in given.items() if name not in self._sums.names} for given in replicas]
        return found | {name: _moved(before[name], total, keeps) for name, total in self._sums.sum(step, small).items()}

    @torch.no_grad()
    def _step_by_momentum(self, momenta: Mapping[str, Tensor]) -> None:
        names = {parameter: name for name, parameter in self._parts.named}
        keeps, keeps_squares = self._parts.optim.betas
        for group in self._parts.optimizer.param_groups:
            for weight in group["params"]:
                moments, momentum = self._parts.optimizer.state[weight], momenta[names[weight]]
                frozen = self._frozen_after.setdefault(names[weight], int(moments["step"]))
                is_lamb = self._parts.optim.name == "lamb"
                scale = self._coefficient(names[weight], moments, momentum, group["betas"]) if is_lamb else 1.0
                moments["exp_avg"].copy_(momentum)
                moments["step"] += 1
                size = moments["exp_avg_sq"].sqrt() / math.sqrt(1 - keeps_squares**frozen) + group["eps"]
                way = momentum / (1 - keeps ** int(moments["step"])) / size
                if is_lamb:
                    way = way + group["weight_decay"] * weight if group["weight_decay"] else way
                    way = way * scale if group["adapt"] else way
                elif group["weight_decay"]:
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.sub_(way * group["lr"])


def _moved(momentum: Tensor, gradient: Tensor, keeps: float) -> Tensor:
    return momentum * keeps + gradient * (1 - keeps)
