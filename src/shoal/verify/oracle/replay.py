"""One process for parameter servers whose reads depend on timing: it computes what the log of a run says that the run computed.

Update r of the log is a list of work units, the version of each shard that each was computed from, and a factor for each. Here
every gradient is computed anew, on the whole model with its weights put together from these versions; they are multiplied, added
from left to right, and given to one optimizer over whole tensors. ``rules.py`` has held the record against the rule before.

    w(0) as built        g = sum over i in update r of f_i * gradient(unit_i, w(v_i))        w(r+1) = optimizer(w(r), g)

Under Downpour the place of a gradient is taken by the sum of those that a worker computed on its own way: u = w(v) when it reads,
then u <- u - rate * gradient(unit, u) after each. Where pushes are compressed, what a server decodes takes the place of what a
worker pushed (``pushes.py``).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.optim.build import set_rate
from shoal.optim.rates import rate
from shoal.verify.oracle.pushes import DecodedPushes
from shoal.verify.reference.case import Case, UpdateLog
from shoal.verify.reference.model import (
    ReferenceModel,
    assert_alone,
    build_reference,
    cut_batch,
    global_batches,
    measure_movement,
    norm_of,
    refuse_not_finite,
    weigh,
)
from shoal.verify.reference.recording import Recorder, model_tensors, saved_buffers
from shoal.verify.reference.train import group_gradients

Weights = Mapping[str, Tensor]
Pushed = tuple[dict[str, Tensor], list[float], list[float]]
"""A gradient, and of every work unit in it the mean loss and the weight."""


def run_replay(case: Case, log: UpdateLog, folder: Path) -> dict[str, Any]:
    """Make the updates of a log and record each in ``folder``, as ``run_reference`` records steps.

    Raises:
        RequestError: the model draws random numbers of its own, or its loss is not finite even here.
    """
    parts = build_reference(case)
    training = Replay(parts, log)
    recorder = Recorder(folder, "reference")
    initial = {name: parameter.detach().clone() for name, parameter in parts.named}
    for number in range(len(log.updates)):
        loss = training.update(number)
        norm = norm_of(list(training.gradients.values()))
        refuse_not_finite(loss, norm, number)
        tensors = {f"grad/{name}": gradient for name, gradient in training.gradients.items()}
        tensors |= model_tensors(parts.named, parts.optimizer, saved_buffers(parts.model))
        recorder.add(loss=loss, norm=norm, skipped=False, tensors=tensors)
    recorder.close(flat=None, movement=measure_movement(parts, initial))
    assert_alone()
    return {"flat": None}


class Replay:
    """A model, all versions of its weights that the log still asks for, and the optimizer that makes new ones."""

    def __init__(self, parts: ReferenceModel, log: UpdateLog) -> None:
        assert not parts.precision.scales_loss, "servers scale no loss"
        self._parts, self._log = parts, log
        self._batches = list(global_batches(parts))
        self._last_use: dict[int, int] = {}
        for number, update in enumerate(log.updates):
            for part in update["parts"]:
                for work in part["works"]:
                    self._last_use |= dict.fromkeys(work["read"] or (), number)
        self._versions: dict[int, Weights] = {}
        self._keep(0)
        self._own: dict[str, Weights] = {}
        """By worker: its weights after its own steps."""
        self._pushes = None if log.compress is None else DecodedPushes(parts, log)
        self._unsent: dict[str, list[Mapping[str, Any]]] = {}
        """By worker: its pushes that are not decoded yet, in the order in which it made them."""
        for part in sorted((part for update in log.updates for part in update["parts"]), key=lambda one: one["number"]):
            self._unsent.setdefault(part["worker"], []).append(part)
        self._ready: dict[tuple[str, int], Pushed] = {}
        self.gradients: dict[str, Tensor] = {}
        """Those that made the last update."""

    def update(self, number: int) -> float:
        """Make one update; the mean loss over its work units, each by the weights that it met."""
        parts, entries = self._parts, self._log.updates[number]["parts"]
        newest = self._copy()
        total: dict[str, Tensor] = {}
        losses: list[float] = []
        weights: list[float] = []
        for entry in entries:
            found, own_losses, own_weights = self._push(entry) if self._pushes is None else self._decoded(entry)
            losses += own_losses
            weights += own_weights
            # A product, then a sum: each rounds once.
            own = {name: grad if entry["factor"] == 1.0 else grad * entry["factor"] for name, grad in found.items()}
            total = _add(total, own)
        self._load(newest)
        self.gradients = total
        set_rate(parts.optimizer, rate(parts.optim, number, self._log.total_updates))
        for name, parameter in parts.named:
            parameter.grad = total[name].clone()
        parts.optimizer.step()
        self._keep(number + 1)
        self._versions = {
            version: kept for version, kept in self._versions.items() if self._last_use.get(version, -1) > number
        }
        whole = sum(weights)
        if not whole:
            return sum(losses) / len(losses)
        return sum(loss * weight for loss, weight in zip(losses, weights, strict=True)) / whole

    def _decoded(self, entry: Mapping[str, Any]) -> Pushed:
        """A push as servers decode it.

        What a worker keeps goes from push to push, so its earlier ones come first, whatever update they are in; what they were
        computed from is older still.
        """
        assert self._pushes is not None
        worker = entry["worker"]
        while self._unsent[worker] and self._unsent[worker][0]["number"] <= entry["number"]:
            other = self._unsent[worker].pop(0)
            found, losses, weights = self._push(other)
            units = [work["unit"] for work in other["works"]]
            sent = self._pushes.decoded(found, worker=worker, units=units)
            self._ready[worker, other["number"]] = sent, losses, weights
        return self._ready.pop((worker, entry["number"]))

    def _push(self, entry: Mapping[str, Any]) -> Pushed:
        """What a worker pushed: the sum of its gradients, with the loss and the weight of each."""
        found: dict[str, Tensor] = {}
        losses: list[float] = []
        weights: list[float] = []
        for work in entry["works"]:
            loss, weight, gradient = self._work(entry, work)
            found = _add(found, gradient)
            losses.append(loss)
            weights.append(weight)
        return found, losses, weights

    def _work(self, entry: Mapping[str, Any], work: Mapping[str, Any]) -> tuple[float, float, dict[str, Tensor]]:
        """One gradient of a worker, and its own step by it where the rule has one."""
        worker, read = entry["worker"], work["read"]
        weights = self._own[worker] if read is None else self._put_together(read)
        self._load(weights)
        loss, weight, gradient = self._unit_gradient(work["unit"])
        if self._log.takes_own_steps:
            # In one row, as workers have it: whether a product and its sum round once or twice depends on the place in a row.
            row = self._row(weights)
            row.add_(self._row(gradient), alpha=-self._own_rate(entry["index"], work["unit"]))
            self._own[worker] = self._unrow(row, weights)
        return loss, weight, gradient

    def _own_rate(self, index: int, unit: int) -> float:
        parts, rates = self._parts, self._log.own_rates
        if rates:
            return rates[min(index, len(rates) - 1)]
        return rate(parts.optim, unit // self._log.tree.replicas, parts.case.total_steps)

    def _row(self, tensors: Weights) -> Tensor:
        return torch.cat([tensors[name].reshape(-1)[start:stop] for name, start, stop, _ in self._log.pieces])

    def _unrow(self, row: Tensor, like: Weights) -> Weights:
        found = {name: torch.empty_like(tensor) for name, tensor in like.items()}
        offset = 0
        for name, start, stop, _ in self._log.pieces:
            found[name].view(-1)[start:stop] = row[offset : offset + stop - start]
            offset += stop - start
        return found

    def _unit_gradient(self, unit: int) -> tuple[float, float, dict[str, Tensor]]:
        """Mean loss, weight and gradient of one share of one step, by the weights that the model has now."""
        parts, log = self._parts, self._log
        step, share = divmod(unit, log.tree.replicas)
        cuts = cut_batch(self._batches[step], log.tree)
        own = sum(weigh(parts, cut) for cut in cuts[share])
        total = sum(weigh(parts, cut) for group in cuts for cut in group) if log.adds_to_steps else own
        total = max(1.0, total)
        partial, found = group_gradients(parts, step, cuts[share], log.tree, total=total)
        mean = float(partial) * total / own if own else 0.0
        # A push is a whole row: what a worker has no gradient of is zeros there.
        return mean, own, {name: found.get(name, torch.zeros_like(value)) for name, value in parts.named}

    def _put_together(self, versions: Sequence[int]) -> Weights:
        """The weights as a worker had them, each shard's slices in the version that it read of that shard."""
        if len(set(versions)) == 1:
            return self._versions[versions[0]]
        mixed = {name: torch.empty_like(tensor) for name, tensor in self._versions[versions[0]].items()}
        for name, start, stop, shard in self._log.pieces:
            source = self._versions[versions[shard]][name]
            mixed[name].view(-1)[start:stop] = source.view(-1)[start:stop]
        return mixed

    @torch.no_grad()
    def _load(self, weights: Weights) -> None:
        for name, parameter in self._parts.named:
            parameter.copy_(weights[name])

    def _keep(self, version: int) -> None:
        self._versions[version] = self._copy()

    def _copy(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone().contiguous() for name, parameter in self._parts.named}


def _add(total: Mapping[str, Tensor], more: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: total[name] + grad for name, grad in more.items()} if total else more
