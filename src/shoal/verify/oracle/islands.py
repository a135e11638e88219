"""One process that plays all islands of a plan, one after the other, by the rules of the papers. No code of ``replicas/``.

Every island is a model with an optimizer of its own that sees its share of each global batch; between steps the rule is applied
to all of them at once. The rules and the graphs are written a second time here, as formulas over lists of islands: a bug that
both sides shared would be equal on both. Each island is recorded by itself, as ``run_reference`` records a run.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.core.compressrule import CompressRule
from shoal.core.seeding import derive_key
from shoal.core.syncrule import SyncRule
from shoal.optim.build import set_rate
from shoal.optim.rates import rate
from shoal.verify.oracle.codecs import key_of, largest_places, only
from shoal.verify.oracle.coded_weights import reading_coded
from shoal.verify.oracle.fragments import fragments_of
from shoal.verify.oracle.sums import CompressedSums, owner_of
from shoal.verify.reference.case import Case, Tree
from shoal.verify.reference.model import (
    Ids,
    ReferenceModel,
    assert_alone,
    build_reference,
    global_batches,
    measure_movement,
    norm_of,
    refuse_not_finite,
)
from shoal.verify.reference.recording import Recorder, model_tensors, saved_buffers
from shoal.verify.reference.train import narrow_weights, tree_gradients

Weights = dict[str, Tensor]


def run_islands(case: Case, tree: Tree, folder: Path) -> dict[str, Any]:
    """Train ``case.steps`` steps on all islands and record those of island K as ``reference-K``.

    Raises:
        RequestError: the model draws random numbers of its own, or a loss is not finite even here.
    """
    rule = SyncRule.parse(tree.sync)
    islands = [build_reference(case) for _ in range(tree.islands)]
    agreement = Agreement(
        rule, tree.settings, [dict(one.named) for one in islands], seed=case.seed, sums=_build_sums(islands[0], tree)
    )
    recorders = [Recorder(folder, f"reference-{number}") for number in range(tree.islands)]
    initial = {name: parameter.detach().clone() for name, parameter in islands[0].named}
    for step, ids in enumerate(global_batches(islands[0])):
        lr = rate(islands[0].optim, step, case.total_steps)
        found = []
        for one, share in zip(islands, _shares(ids, tree), strict=True):
            with reading_coded(one, tree.compression):
                found.append(tree_gradients(one, step, share, tree, 1.0))
        gradients = [own for _, own in found]
        if step < rule.start:
            gradients = _mean_gradients(gradients)
        captured: list[Weights] = []
        norms: list[float] = []
        for (loss, _), own in zip(found, gradients, strict=True):
            norms.append(norm_of(list(own.values())))
            refuse_not_finite(loss, norms[-1], step)
            captured.append({f"grad/{name}": grad.clone() for name, grad in own.items()})
        agreement.before_update()
        for one, own, norm in zip(islands, gradients, norms, strict=True):
            set_rate(one.optimizer, lr)
            _update(one, own, norm)
        if agreement.after_update(step, lr, [len(share) for share in _shares(ids, tree)]):
            _average_statistics(islands)
        for number in agreement.left_out:
            islands[number].optimizer.state.clear()
        for number, one in enumerate(islands):
            captured[number] |= model_tensors(one.named, one.optimizer, saved_buffers(one.model))
            captured[number] |= agreement.memory(number)
            recorders[number].add(loss=found[number][0], norm=norms[number], skipped=False, tensors=captured[number])
    for recorder, one in zip(recorders, islands, strict=True):
        recorder.close(flat=None, movement=measure_movement(one, initial), narrow=narrow_weights(one, tree))
    assert_alone()
    return {"flat": None}


def _build_sums(island: ReferenceModel, tree: Tree) -> CompressedSums | None:
    """How changes go between islands; None where they go as they are."""
    if tree.compress is None:
        return None
    return CompressedSums(
        CompressRule.parse(tree.compress),
        tree.compression,
        {name: tuple(parameter.shape) for name, parameter in island.named},
        seed=island.case.seed,
        num_ranks=tree.islands,
        has_way_back=True,
    )


def _shares(ids: Ids, tree: Tree) -> list[Ids]:
    """The samples of each island: as many even parts as there are microbatches in all, those of an island side by side."""
    cuts = np.array_split(ids, tree.islands * tree.replicas * tree.microbatches)
    each = tree.replicas * tree.microbatches
    return [np.concatenate(cuts[first : first + each]) for first in range(0, len(cuts), each)]


def _mean_gradients(gradients: Sequence[Weights]) -> list[Weights]:
    mean = {name: _mean([own[name] for own in gradients]) for name in gradients[0]}
    return [{name: one.clone() for name, one in mean.items()} for _ in gradients]


def _update(parts: ReferenceModel, gradients: Mapping[str, Tensor], norm: float) -> None:
    limit = parts.optim.clip
    shorten = limit / norm if limit is not None and norm > limit else 1.0
    for name, parameter in parts.named:
        gradient = gradients.get(name)
        parameter.grad = gradient if gradient is None or shorten == 1.0 else gradient * shorten
    parts.optimizer.step()


@torch.no_grad()
def _average_statistics(islands: Sequence[ReferenceModel]) -> None:
    """Running means and variances of batch norm are averaged where all weights agree."""
    named = [
        {name: buffer for name, buffer in one.model.named_buffers() if name.endswith(("running_mean", "running_var"))}
        for one in islands
    ]
    for name in named[0]:
        mean = _mean([own[name] for own in named])
        for own in named:
            own[name].copy_(mean)


def _sum(values: Sequence[Tensor]) -> Tensor:
    total = values[0].clone()
    for value in values[1:]:
        total = total + value
    return total


def _mean(values: Sequence[Tensor]) -> Tensor:
    return _sum(values) / len(values)


class Agreement:
    """The rule between islands.

    Args:
        rule: of the plan.
        settings: the recipe's ``[replicas]``.
        islands: the parameters of each island by name, live.
        seed: of the run.
        sums: how changes are summed, where they go compressed.
    """

    def __init__(
        self,
        rule: SyncRule,
        settings: Mapping[str, Any],
        islands: Sequence[Mapping[str, Tensor]],
        *,
        seed: int,
        sums: CompressedSums | None = None,
    ) -> None:
        self.rule, self.settings, self.seed, self.sums = rule, settings, seed, sums
        self.islands = [{name: weight.detach() for name, weight in own.items()} for own in islands]
        self.names = sorted(self.islands[0])
        self.agreed = {name: self.islands[0][name].clone() for name in self.names}
        self.momentum = {name: torch.zeros_like(self.agreed[name]) for name in self.names}
        self.in_flight: Weights = {}
        self.left_out: list[int] = []
        """Islands whose change was not finite in the round that was just applied."""
        self.told = [{name: own[name].clone() for name in self.names} for own in self.islands]
        self.heard = [{name: own[name].clone() for name in self.names} for own in self.islands]
        """What each island has told of its weights, and the mean of what its neighbours have, where gossip is compressed."""
        self.unsent = [{name: torch.zeros_like(self.agreed[name]) for name in self.names} for _ in islands]
        """What each island of sparse has not sent."""
        self.missing: dict[int, list[int]] = {}
        """The same of the fragments that are under way."""
        self.samples = {name: [0] * len(islands) for name in self.names}
        """That each island has learnt from since a parameter was agreed on."""
        self.numbers = [1.0] * len(islands)
        """The w of push-sum."""
        self.rounds = 0
        self.since = 0
        self.rates: list[float] = []
        """Of the steps of the round that is under way."""
        rules: dict[str, Callable[[int, float], bool]] = {
            "local": self._local,
            "diloco": self._diloco,
            "slowmo": self._slowmo,
            "easgd": self._easgd,
            "sparse": self._sparse,
            "stream": self._stream,
            "gossip": self._gossip,
            "pushsum": self._gossip,
        }
        self._apply = rules[rule.kind]

    @torch.no_grad()
    def before_update(self) -> None:
        """Push-sum steps its numerator, and the model is a quotient."""
        for own, number in zip(self.islands, self.numbers, strict=True):
            if number != 1.0:
                for weight in own.values():
                    weight.copy_(weight * number)

    @torch.no_grad()
    def after_update(self, step: int, lr: float, samples: Sequence[int]) -> bool:
        """The rule after a step, of which each island had so many samples; True where all hold the same weights then because
        of it."""
        self.left_out = []
        if step < self.rule.start:
            self.agreed = {name: self.islands[0][name].clone() for name in self.names}
            return False
        self.since += 1
        for counted in self.samples.values():
            counted[:] = [one + more for one, more in zip(counted, samples, strict=True)]
        return self._apply(step, lr)

    def _is_round(self, step: int, lr: float) -> bool:
        due: bool
        if self.rule.kind == "local" and self.settings["interval"] == "qsr":
            # Gu et al. 2024: a round's length follows from the rate that it begins with. In warm-up, where rates rise, it is H_0.
            self.rates = [lr] if self.since == 1 else [*self.rates, lr]
            rises = any(one > self.rates[0] for one in self.rates)
            longer = 0 if rises else int((self.settings["interval_scale"] / max(self.rates[0], 1e-12)) ** 2)
            due = self.since >= longer and self.since >= self.rule.period
        else:
            due = (step + 1 - self.rule.start) % self.rule.period == 0
        if due:
            self.since = 0
        return due

    def memory(self, island: int) -> Weights:
        """What an island remembers of changes that it could not send, by the names that captures use; without what is left of
        the way back, of which every island has a slice."""
        found = self.sums.memory() if self.sums is not None and self.rule.kind != "gossip" else {}
        return {
            f"optimizer/{key}": value
            for key, value in found.items()
            if owner_of(key) in (None, island) and not key.endswith("/sum_residual")
        }

    def _add_up(self, changes: Mapping[str, Sequence[Tensor]], step: int) -> Weights:
        """What islands send, added in their order, by what of it goes through where it goes compressed."""
        if self.sums is None:
            return {name: _sum(values) for name, values in changes.items()}
        sent = [{name: values[island] for name, values in changes.items()} for island in range(len(self.islands))]
        found = dict(self.sums.sum(step, sent))
        self.sums.commit()
        return found

    def _changes(self, names: Sequence[str], step: int) -> tuple[Weights, list[int]]:
        """The mean of what islands have changed since they agreed, and the islands that are left out: a change that is not finite
        counts as nothing, and the others are divided by their number, or by their samples."""
        found = {name: [self.agreed[name] - own[name] for own in self.islands] for name in names}
        count = len(self.islands)
        missing = [
            one for one in range(count) if not all(bool(torch.isfinite(found[name][one]).all()) for name in names)
        ]
        for changes in found.values():
            for one in missing:
                changes[one] = torch.zeros_like(changes[one])
        if self.settings["weigh"] == "samples":
            shares = [0 if one in missing else self.samples[names[0]][one] for one in range(count)]
            found = {
                name: [change * (share / sum(shares)) for change, share in zip(changes, shares, strict=True)]
                for name, changes in found.items()
            }
            return self._add_up(found, step), missing
        added = self._add_up(found, step)
        return {name: one / (count - len(missing)) for name, one in added.items()}, missing

    def _round(self, step: int) -> Weights:
        """The changes of a round of the whole model."""
        changes, self.left_out = self._changes(self.names, step)
        self.samples = {name: [0] * len(self.islands) for name in self.names}
        return changes

    def _take_agreed(self, name: str) -> None:
        for own in self.islands:
            own[name].copy_(self.agreed[name])

    def _local(self, step: int, lr: float) -> bool:
        if not self._is_round(step, lr):
            return False
        for name, change in self._round(step).items():
            self.agreed[name] = self.agreed[name] - change
            self._take_agreed(name)
        return True

    def _nesterov(self, name: str, change: Tensor) -> None:
        # Sutskever et al. 2013 in the form of torch.optim.SGD: m = u m + d, f = f - o (d + u m).
        share, outer = self.settings["outer_momentum"], self.settings["outer_lr"]
        if share is None:
            # The papers have 0.9; with short rounds and nothing kept of an island's own that is too much.
            share = {"diloco": 0.5, "stream": 0.9}[self.rule.kind]
        self.momentum[name] = share * self.momentum[name] + change
        self.agreed[name] = self.agreed[name] - outer * (change + share * self.momentum[name])

    def _diloco(self, step: int, lr: float) -> bool:
        if not self._is_round(step, lr):
            return False
        for name, change in self._round(step).items():
            self._nesterov(name, change)
            self._take_agreed(name)
        return True

    def _slowmo(self, step: int, lr: float) -> bool:
        if not self._is_round(step, lr):
            return False
        for name, change in self._round(step).items():
            self.momentum[name] = self.settings["slow_momentum"] * self.momentum[name] + change / lr
            self.agreed[name] = self.agreed[name] - (self.settings["slow_lr"] * lr) * self.momentum[name]
            self._take_agreed(name)
        return True

    def _sparse(self, step: int, lr: float) -> bool:
        if not self._is_round(step, lr):
            return False
        self.left_out = []
        sent: list[Weights] = []
        for number, (own, unsent) in enumerate(zip(self.islands, self.unsent, strict=True)):
            for name in self.names:
                unsent[name] = self.settings["sparse_decay"] * unsent[name] + (self.agreed[name] - own[name])
            if not all(bool(torch.isfinite(one).all()) for one in unsent.values()):
                self.left_out.append(number)
                unsent |= {name: torch.zeros_like(one) for name, one in unsent.items()}
            sent.append({name: self._largest(unsent[name]) for name in self.names})
            for name in self.names:
                unsent[name] = unsent[name] - sent[-1][name]
        for name in self.names:
            mean = _sum([torch.zeros_like(self.agreed[name]), *(one[name] for one in sent)])
            self.agreed[name] = self.agreed[name] - mean / (len(self.islands) - len(self.left_out))
            self._take_agreed(name)
        return True

    def _largest(self, given: Tensor) -> Tensor:
        """The largest of every 4096 elements, as they are or by four levels, and zeros elsewhere."""
        flat = given.reshape(-1).numpy()
        found = np.zeros_like(flat)
        for first in range(0, len(flat), 4096):
            chunk = flat[first : first + 4096]
            places = np.argsort(-np.abs(chunk), kind="stable")[: max(1, int(self.rule.keep * len(chunk)))]
            values = chunk[places]
            if self.settings["sparse_bits"] == 2:
                top = np.abs(values).max()
                far = np.abs(values) > top * values.dtype.type(2 / 3)
                levels = np.where(far, np.float32(1.0), np.float32(1 / 3)) * np.float32(top)
                values = np.where(values < 0, -levels, levels).astype(chunk.dtype)
            found[first + places] = values
        return torch.from_numpy(found).view_as(given)

    def _easgd(self, step: int, lr: float) -> bool:
        if not self._is_round(step, lr):
            return False
        pull = self.settings["pull"] or 0.9 / len(self.islands)
        self.left_out = [
            number
            for number, own in enumerate(self.islands)
            if not all(bool(torch.isfinite(own[name] - self.agreed[name]).all()) for name in self.names)
        ]
        for name in self.names:
            moved = [pull * (own[name] - self.agreed[name]) for own in self.islands]
            for number in self.left_out:
                moved[number] = torch.zeros_like(moved[number])
            for own, one in zip(self.islands, moved, strict=True):
                own[name].copy_(own[name] - one)
            self.agreed[name] = self.agreed[name] + _sum(moved)
            for number in self.left_out:
                self.islands[number][name].copy_(self.agreed[name])
        return False

    def _stream(self, step: int, lr: float) -> bool:
        period, count, delay = self.rule.period, self.rule.fragments, self.rule.delay
        keeps = self.settings["mixing"]
        agrees = False
        for fragment, names in enumerate(fragments_of(self.names, count)):
            first = period + fragment * (period // count)
            if step + 1 >= first and (step + 1 - first) % period == 0:
                sent, self.missing[fragment] = self._changes(names, step)
                self.in_flight |= sent
            if step + 1 - delay >= first and (step + 1 - delay - first) % period == 0:
                self.left_out = self.missing.pop(fragment)
                for name in names:
                    self.samples[name] = [0] * len(self.islands)
                    self._nesterov(name, self.in_flight.pop(name))
                    for number, own in enumerate(self.islands):
                        kept = self.agreed[name] + keeps * (own[name] - self.agreed[name])
                        own[name].copy_(kept if keeps and number not in self.left_out else self.agreed[name])
                agrees = count == 1 and delay == 0 and not keeps
        return agrees

    def _choco(self, step: int) -> None:
        """Koloskova et al. 2019, algorithm 2: what each island has told of itself (h), and the mean of that (s)."""
        sums = self.sums
        assert sums is not None
        for name in self.names:
            sent: list[Tensor] = []
            for island, own in enumerate(self.islands):
                flat = (own[name] - self.told[island][name]).reshape(-1).numpy()
                if name in sums.names and sums.is_compressed(step):
                    if sums.rule.kind == "topk":
                        flat = only(flat, largest_places(flat, sums.rule.number))
                    else:
                        flat = sums.code(flat, key_of(self.seed, step, f"{name}/{island}"))
                sent.append(torch.from_numpy(flat).view_as(own[name]))
            for island, row in enumerate(self._shares_of_round()):
                self.told[island][name] = self.told[island][name] + sent[island]
                for one, share in zip(sent, row, strict=True):
                    if share:
                        self.heard[island][name] = self.heard[island][name] + one * share
                way = self.heard[island][name] - self.told[island][name]
                self.islands[island][name].copy_(self.islands[island][name] + self.settings["gossip_rate"] * way)

    def _gossip(self, step: int, lr: float) -> bool:
        if self.sums is not None:
            if self._is_round(step, lr):
                self._choco(step)
            return False
        if self._is_round(step, lr):
            shares = self._shares_of_round()
            for name in self.names:
                before = [own[name].clone() for own in self.islands]
                for own, row in zip(self.islands, shares, strict=True):
                    own[name].copy_(_sum([one * share for one, share in zip(before, row, strict=True) if share]))
            if self.rule.kind == "pushsum":
                self.numbers = [
                    sum(share * number for share, number in zip(row, self.numbers, strict=True) if share)
                    for row in shares
                ]
            self.rounds += 1
        for own, number in zip(self.islands, self.numbers, strict=True):
            if number != 1.0:
                for weight in own.values():
                    weight.copy_(weight * (1.0 / number))
        return False

    def _shares_of_round(self) -> list[list[float]]:
        """Row i: what island i takes of each."""
        count, graph = len(self.islands), self.rule.graph or ""
        is_directed = self.rule.kind == "pushsum"
        rows = [[0.0] * count for _ in range(count)]
        if graph == "complete":
            return [[1.0 / count] * count for _ in range(count)]
        if graph == "ring":
            for place in range(count):
                near = sorted({(place - 1) % count, place, (place + 1) % count})
                for other in near:
                    rows[place][other] = 1.0 / len(near)
            return rows
        if graph.endswith(".json"):
            return self._shares_of_file(json.loads(Path(graph).read_text())["edges"], is_directed=is_directed)
        for sender, receiver in enumerate(self._receivers(graph, is_directed=is_directed)):
            rows[sender][sender] += 0.5
            rows[receiver][sender] += 0.5
        return rows

    def _receivers(self, graph: str, *, is_directed: bool) -> list[int]:
        count = len(self.islands)
        if graph == "exponential":
            hop = 2 ** (self.rounds % max(1, (count - 1).bit_length()))
            return [(place + hop) % count for place in range(count)]
        if is_directed:
            drawn = [derive_key(self.seed, "push-sum", self.rounds, place) % (count - 1) for place in range(count)]
            return [other if other < place else other + 1 for place, other in enumerate(drawn)]
        order = sorted(range(count), key=lambda place: derive_key(self.seed, "gossip", self.rounds, place))
        partner = {place: place for place in order}
        for first in range(0, count - 1, 2):
            partner[order[first]], partner[order[first + 1]] = order[first + 1], order[first]
        return [partner[place] for place in range(count)]

    def _shares_of_file(self, edges: Sequence[Sequence[int]], *, is_directed: bool) -> list[list[float]]:
        count = len(self.islands)
        rows = [[0.0] * count for _ in range(count)]
        if is_directed:
            for sender in range(count):
                receivers = {sender} | {end for start, end in edges if start == sender}
                for receiver in receivers:
                    rows[receiver][sender] = 1.0 / len(receivers)
            return rows
        # Xiao and Boyd 2004: an edge weighs 1 / (1 + the larger degree of its ends), and the rest of a row is an island's own.
        near = [
            {other for edge in edges for other in edge if place in edge and other != place} for place in range(count)
        ]
        for place in range(count):
            whole = math.lcm(*(1 + max(len(near[place]), len(near[other])) for other in near[place]))
            taken = 0
            for other in near[place]:
                part = whole // (1 + max(len(near[place]), len(near[other])))
                rows[place][other] = part / whole
                taken += part
            rows[place][place] = (whole - taken) / whole
        return rows
