"""Sums over ranks in which tensors go compressed, by the methods' own rules, in one process. No code of ``compression/``.

Rank r has p_r = g_r + e_r, what it wants to send and what it could not send before (Karimireddy et al. 2019, algorithm 2)::

    blocks     leg 1: q_r = Q(p_r), e_r = p_r - q_r, s = q_0 + q_1 + ...; leg 2: t = s + f, sum = Q'(t), f = t - sum
    selections q_r keeps some places of p_r and has zeros elsewhere; sum = 0 + q_0 + q_1 + ..., e_r = p_r - q_r
    dgc        u_r = m u_r + g_r, v_r = v_r + u_r; the largest of v_r are sent; u_r and v_r are zero there (Lin et al. 2018)
    powersgd   P = orthonormal(sum M_r Q), Q = sum M_r^T P, sum = P Q^T, e_r = M_r - sum / n (Vogels et al. 2019, algorithm 1)

Leg 2 is there where every rank needs the whole sum; Q' is Q, but int8 where Q is int4. Tensors that are small or have one dim are
added as they are.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.core.compressrule import CompressRule
from shoal.verify.oracle.codecs import (
    Floats,
    block_codec,
    draw_uniform,
    key_of,
    largest_places,
    only,
    places_above,
    random_ranges,
)

_SELECTING = ("topk", "threshold", "randk", "dgc")
_WITH_MEMORY = ("int4", "topk", "randk", "threshold", "sign", "onebit", "powersgd")
_DGC_STAGES = 4
_DEPENDENT = 1e-6


class CompressedSums:
    """The sums of some ranks, and what they remember from step to step.

    Args:
        rule: the plan's ``compress``.
        settings: the recipe's ``[compression]``.
        shapes: of every tensor that is summed, whole.
        seed: of the run.
        num_ranks: how many add up.
        has_way_back: every rank needs the whole sum; else each keeps a shard of it.
    """

    def __init__(
        self,
        rule: CompressRule,
        settings: Mapping[str, Any],
        shapes: Mapping[str, Sequence[int]],
        *,
        seed: int,
        num_ranks: int,
        has_way_back: bool,
    ) -> None:
        self.rule, self.seed, self.num_ranks = rule, seed, num_ranks
        self._settings = settings
        residual = settings["residual"]
        self._remembers = rule.kind in _WITH_MEMORY if residual is None else bool(residual)
        self._is_blocks = rule.kind not in (*_SELECTING, "powersgd")
        self._has_way_back = self._is_blocks and has_way_back and bool(settings["both_ways"])
        self.names = {name for name, shape in shapes.items() if self._is_compressed(shape)}
        """Tensors that go compressed; the others are added as they are."""
        self._shapes = shapes
        self._kept: dict[str, Floats] = {}
        """Memory by ``TENSOR/WHAT``, and ``TENSOR/WHAT-R`` where it is rank R's own; flat, but for matrices of PowerSGD."""
        for name in self.names:
            self._kept |= self._first_memory(name, shapes[name])
        self._next: dict[str, Floats] = {}

    def _is_compressed(self, shape: Sequence[int]) -> bool:
        numel = math.prod(shape)
        if len(shape) < 2 or numel < self._settings["min_elements"]:
            return False
        if self.rule.kind != "powersgd":
            return True
        rows, cols = shape[0], numel // max(1, shape[0])
        least: float = self._settings["min_rate"]
        return (rows + cols) * self._factor_rank(rows, cols) * least < numel

    def _factor_rank(self, rows: int, cols: int) -> int:
        return min(int(self.rule.number), rows, cols)

    def _first_memory(self, name: str, shape: Sequence[int]) -> dict[str, Floats]:
        numel = math.prod(shape)
        own = ["momentum", "unsent"] if self.rule.kind == "dgc" else ["residual"] if self._remembers else []
        found = {
            f"{name}/{what}-{rank}": np.zeros(numel, dtype=np.float32) for what in own for rank in range(self.num_ranks)
        }
        if self._has_way_back and self._remembers:
            found[f"{name}/sum_residual"] = np.zeros(numel, dtype=np.float32)
        if self.rule.kind == "powersgd":
            cols = numel // shape[0]
            found[f"{name}/right"] = self._new_right(
                cols, self._factor_rank(shape[0], cols), key_of(self.seed, 0, name)
            )
        return found

    @staticmethod
    def _new_right(cols: int, rank: int, key: int) -> Floats:
        return draw_uniform(key, np.arange(cols * rank, dtype=np.int64)).reshape(cols, rank) - np.float32(0.5)

    def commit(self) -> None:
        """The step was taken: what the last sums left is remembered."""
        self._kept |= self._next
        self._next = {}

    def forget(self) -> None:
        """The step was not taken."""
        self._next = {}

    def memory(self) -> dict[str, Tensor]:
        """All that is remembered, by ``TENSOR/WHAT``; what is a rank's own has the tensor's shape."""
        found = {key: torch.from_numpy(value.copy()) for key, value in self._kept.items()}
        return {
            key: value if owner_of(key) is None else value.view(*self._shapes[key.rpartition("/")[0]])
            for key, value in found.items()
        }

    def is_compressed(self, number: int) -> bool:
        """True at and after the rule's first step."""
        return number >= self.rule.start

    def sum(self, number: int, given: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The sum over ranks of every tensor that any of them has; a tensor that a rank lacks is zeros there.

        Args:
            number: of the step, which draws belong to.
            given: what each rank has.
        """
        assert len(given) == self.num_ranks
        found: dict[str, Tensor] = {}
        for name in sorted(set().union(*given)):
            like = next(own[name] for own in given if name in own)
            tensors = [own.get(name, torch.zeros_like(like)) for own in given]
            if name not in self.names or not self.is_compressed(number):
                found[name] = add_up(tensors)
                continue
            flats = [_flat(tensor) for tensor in tensors]
            total = (
                self._sum_matrix(name, number, flats, like.shape) if self._is_matrix else self._sum(name, number, flats)
            )
            found[name] = torch.from_numpy(total).view(like.shape).to(like.dtype)
        return found

    @property
    def _is_matrix(self) -> bool:
        return self.rule.kind == "powersgd"

    def _sum(self, name: str, number: int, given: Sequence[Floats]) -> Floats:
        if self._is_blocks:
            return self._sum_blocks(name, number, given)
        total = np.zeros_like(given[0])
        for rank, own in enumerate(given):
            total = total + self._select(name, number, rank, own)
        return total

    def _wanted(self, name: str, rank: int, given: Floats) -> Floats:
        return given + self._kept[f"{name}/residual-{rank}"] if self._remembers else given

    def _keep(self, name: str, rank: int, wanted: Floats, sent: Floats) -> None:
        if self._remembers:
            with np.errstate(invalid="ignore"):
                self._next[f"{name}/residual-{rank}"] = wanted - sent

    def _back_rule(self) -> CompressRule:
        """What codes a sum on its way back."""
        wanted = self._settings["back"]
        goes_as_int8 = wanted == "int8" or (wanted is None and self.rule.kind == "int4")
        return CompressRule(kind="int8", block=self.rule.block) if goes_as_int8 else self.rule

    def code(self, flat: Floats, key: int, rule: CompressRule | None = None) -> Floats:
        """What is left of a tensor that was coded element by element, by the plan's codec or another."""
        codec = block_codec(
            rule or self.rule, block=self._settings["block"], at_random=self._settings["round"] == "keyed"
        )
        return codec(flat, key, 0)

    def _sum_blocks(self, name: str, number: int, given: Sequence[Floats]) -> Floats:
        sent = []
        for rank, own in enumerate(given):
            wanted = self._wanted(name, rank, own)
            sent.append(self.code(wanted, key_of(self.seed, number, f"{name}/{rank}")))
            self._keep(name, rank, wanted, sent[-1])
        total = sent[0]
        for one in sent[1:]:
            total = total + one
        if not self._has_way_back:
            return total
        if self._remembers:
            total = total + self._kept[f"{name}/sum_residual"]
        back = self.code(total, key_of(self.seed, number, f"{name}/sum"), self._back_rule())
        if self._remembers:
            with np.errstate(invalid="ignore"):
                self._next[f"{name}/sum_residual"] = total - back
        return back

    def _select(self, name: str, number: int, rank: int, given: Floats) -> Floats:
        """What a rank sends of a tensor, as a whole tensor."""
        if self.rule.kind == "dgc":
            return self._select_dgc(name, number, rank, given)
        wanted = self._wanted(name, rank, given)
        if self.rule.kind == "topk":
            sent = only(wanted, largest_places(wanted, self.rule.number))
        elif self.rule.kind == "threshold":
            sent = only(wanted, places_above(wanted, self.rule.number))
        else:
            places, widths = random_ranges(wanted.size, self.rule.number, key_of(self.seed, number, name))
            sent = only(wanted, places)
            if not self._remembers:
                sent[places] = sent[places] * widths.astype(np.float32)
            if not np.isfinite(wanted).all():
                # The places that were drawn may all be good ones.
                sent[places] = np.nan
        self._keep(name, rank, wanted, sent)
        return sent

    def _select_dgc(self, name: str, number: int, rank: int, given: Floats) -> Floats:
        share = np.float32(self._settings["momentum"])
        velocity = self._kept[f"{name}/momentum-{rank}"] * share + given
        unsent = self._kept[f"{name}/unsent-{rank}"] + velocity
        places = largest_places(unsent, self._dgc_ratio(number - self.rule.start))
        sent = only(unsent, places)
        velocity[places] = 0
        unsent[places] = 0
        self._next |= {f"{name}/momentum-{rank}": velocity, f"{name}/unsent-{rank}": unsent}
        return sent

    def _dgc_ratio(self, step: int) -> float:
        """The ratio falls to the plan's by equal factors, in stages (Lin et al. 2018, section 3.3)."""
        warmup: int = self._settings["warmup"]
        if step >= warmup:
            return self.rule.number
        return float(self.rule.number ** ((step * _DGC_STAGES // warmup + 1) / (_DGC_STAGES + 1)))

    def _sum_matrix(self, name: str, number: int, given: Sequence[Floats], shape: Sequence[int]) -> Floats:
        wanted = [self._wanted(name, rank, own) for rank, own in enumerate(given)]
        matrices = [torch.from_numpy(one).view(shape[0], -1) for one in wanted]
        right = torch.from_numpy(self._kept[f"{name}/right"])
        left = orthonormal(add_up([matrix @ right for matrix in matrices]))
        right = add_up([matrix.T @ left for matrix in matrices])
        total: Floats = (left @ right.T).reshape(-1).numpy()
        for rank, one in enumerate(wanted):
            self._keep(name, rank, one, total / np.float32(self.num_ranks))
        # A column of zeros would stay one.
        anew = self._new_right(right.shape[0], right.shape[1], key_of(self.seed, number, name))
        found = right.numpy()
        self._next[f"{name}/right"] = np.where((found == 0).all(axis=0), anew, found)
        return total


def owner_of(key: str) -> int | None:
    """The rank whose own memory a key names; None for what is everyone's."""
    _, dash, rank = key.rpartition("-")
    return int(rank) if dash and rank.isdigit() and "/" not in rank else None


def add_up(tensors: Sequence[Tensor]) -> Tensor:
    """The sum in the order of ranks."""
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total


def orthonormal(matrix: Tensor) -> Tensor:
    """Columns by Gram and Schmidt in float64, each freed of those before it twice; one that depends on them is zero."""
    found = matrix.double().clone()
    for index in range(found.shape[1]):
        rest, earlier = found[:, index], found[:, :index]
        length = float(rest.norm())
        rest = rest - earlier @ (earlier.T @ rest)
        rest = rest - earlier @ (earlier.T @ rest)
        left = float(rest.norm())
        found[:, index] = 0.0 if left <= _DEPENDENT * length else rest / left
    return found.float()


def _flat(tensor: Tensor) -> NDArray[np.float32]:
    found: NDArray[np.float32] = tensor.detach().to(torch.float32).contiguous().reshape(-1).numpy()
    return found
