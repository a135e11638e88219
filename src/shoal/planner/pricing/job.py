"""What is planned: a model, a batch, a precision, on a cluster with a software: what every part of the planner takes.

Ranks that share a sequence (``cp``) have the same weights as replicas have. Experts have groups of their own: ``ep`` ranks
share them, taken from replicas, and from tensor-parallel ranks too where a software leaves an expert's matrices whole (Liu et
al. 2025, arXiv:2504.14960, section 3.2, "parallel folding").
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from shoal.core.errors import RequestError
from shoal.core.pipelines import DEFAULT_SCHEDULE, schedule_facts
from shoal.core.plan import Plan
from shoal.costs.layers import Layer, ModelCosts
from shoal.planner.hardware.devices import WIDE_TYPES, Cluster
from shoal.planner.hardware.software import Software, Stack
from shoal.schedules.catalogue import FAMILIES
from shoal.schedules.schedule import Fold

MOST_SAMPLES = 1_000_000
"""Of a step that is planned for: larger than any that is trained with, and small enough to look for its divisors."""


def check_batch(samples: int) -> None:
    """Refuse a batch that nobody trains with.

    Raises:
        RequestError: says what is allowed.
    """
    if not 1 <= samples <= MOST_SAMPLES:
        raise RequestError(f"the global batch is {samples}; give 1 to {MOST_SAMPLES}")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training job, before it has a plan."""

    chain: ModelCosts
    cluster: Cluster
    stack: Stack
    global_batch: int
    """Samples of a step, over all replicas."""
    precision: str = "bfloat16"
    """Compute type, of ``hardware.COMPUTE_TYPES``."""
    weight_bytes: float = 2.0
    """Of a weight as it is kept."""
    state_bytes: float | None = None
    """Of the optimizer for a weight; what the software's Adam keeps when left out."""

    @property
    def gathered_bytes(self) -> float:
        """Of a weight as ZeRO gathers it: what is computed in float32 is gathered in it."""
        cast = self.stack.software.gathered_bytes
        return self.weight_bytes if cast is None or self._is_wide else cast

    @property
    def reduced_bytes(self) -> float:
        """Of a gradient as it travels."""
        software = self.stack.software
        return self._gradient(software.reduced_bytes, software.reduced_bytes_bfloat16)

    @property
    def gradient_bytes(self) -> float:
        """Of a gradient that stays allocated, all its copies together."""
        software = self.stack.software
        return self._gradient(software.gradient_bytes, software.gradient_bytes_bfloat16)

    @property
    def optimizer_bytes(self) -> float:
        """Of the optimizer for a weight."""
        if self.state_bytes is not None:
            return self.state_bytes
        # What is computed in float32 has no second weight and no second gradient in float32: Adam's two moments are left.
        return 2 * max(4.0, self.weight_bytes) if self._is_wide else self.stack.software.state_bytes

    @property
    def _is_wide(self) -> bool:
        return self.precision in WIDE_TYPES

    def _gradient(self, usual: float, in_bfloat16: float | None) -> float:
        if self._is_wide:
            # Gradients are of the type of their weights.
            return max(4.0, self.weight_bytes)
        return in_bfloat16 if self.precision == "bfloat16" and in_bfloat16 is not None else usual


def weight_bytes_of(software: Software, precision: str) -> float:
    """Bytes of a weight as a software keeps it: in what it computes in, and at least in float32 where it is ours."""
    wide = {"float64": 8.0}.get(precision, 4.0)
    return wide if software.keeps_wide or precision in WIDE_TYPES else 2.0


def ranks_of_stages(plan: Plan) -> tuple[int, ...]:
    """The pipeline rank of every stage; of the two that a bidirectional schedule has, the one of the way down."""
    family = FAMILIES.get(plan.schedule or DEFAULT_SCHEDULE)
    return _fold(plan.pp, plan.chunks or 1, turns=family is not None and family.fold is Fold.VEE)


def sum_by_rank(plan: Plan, by_stage: Iterable[float]) -> list[float]:
    """What stages have, added up by pipeline rank."""
    ranks = [0.0] * plan.pp
    for rank, own in zip(ranks_of_stages(plan), by_stage, strict=True):
        ranks[rank] += own
    return ranks


def spread_blocks(num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """Blocks of every stage: as even as can be, and fewer at the two ends, which have the embedding and the output layer too."""
    low, more = divmod(num_blocks, num_stages)
    counts = [low] * num_stages
    # From the middle outwards.
    order = sorted(range(num_stages), key=lambda stage: abs(2 * stage - (num_stages - 1)))
    for stage in order[:more]:
        counts[stage] += 1
    return tuple(counts)


def cut_stages(chain: ModelCosts, num_stages: int) -> tuple[tuple[int, int], ...]:
    """First layer and end of every stage: blocks spread evenly, what stands before and after them at the ends."""
    return _cut(chain.block_range, len(chain.layers), num_stages)


def count_stages(chain: ModelCosts, num_stages: int) -> tuple[Mapping[int, int], ...]:
    """Layers of every stage: how many of each of ``chain.distinct``."""
    return _count(chain.numbers, cut_stages(chain, num_stages))


def count_ranks(chain: ModelCosts, plan: Plan) -> tuple[Mapping[int, int], ...]:
    """Layers of every pipeline rank: how many of each of ``chain.distinct``; of both ways, where a schedule has two."""
    ranks = ranks_of_stages(plan)
    # The way up has its last stage where the way down has its first.
    ways = (ranks, ranks[::-1]) if schedule_facts(plan.schedule).is_bidirectional else (ranks,)
    return _merge(chain.numbers, cut_stages(chain, len(ranks)), ways)


# A search asks for the same few numbers of stages thousands of times.
@lru_cache(maxsize=1024)
def _fold(pp: int, chunks: int, *, turns: bool) -> tuple[int, ...]:
    way = range(pp)
    return tuple(rank for chunk in range(chunks) for rank in (way[::-1] if turns and chunk % 2 else way))


@lru_cache(maxsize=1024)
def _cut(blocks: tuple[int, int], num_layers: int, num_stages: int) -> tuple[tuple[int, int], ...]:
    at, end = blocks
    cuts = []
    for stage, count in enumerate(spread_blocks(end - at, num_stages)):
        begin = 0 if stage == 0 else at
        at += count
        cuts.append((begin, num_layers if stage == num_stages - 1 else at))
    return tuple(cuts)


@lru_cache(maxsize=1024)
def _count(numbers: tuple[int, ...], cuts: tuple[tuple[int, int], ...]) -> tuple[Mapping[int, int], ...]:
    return tuple(Counter(numbers[begin:end]) for begin, end in cuts)


@lru_cache(maxsize=1024)
def _merge(
    numbers: tuple[int, ...], cuts: tuple[tuple[int, int], ...], ways: tuple[tuple[int, ...], ...]
) -> tuple[Mapping[int, int], ...]:
    ranks: list[Counter[int]] = [Counter() for _ in range(max(ways[0]) + 1)]
    for way in ways:
        for rank, counted in zip(way, _count(numbers, cuts), strict=True):
            ranks[rank].update(counted)
    return tuple(ranks)


@dataclass(frozen=True)
class WeightGroups:
    """Of a plan under a software."""

    dense_copies: int
    """Ranks that have the same part of a dense layer, and sum its gradient."""
    expert_copies: int
    """The same of an expert."""
    dense_shards: int
    """Parts that ZeRO makes of what those ranks have in common."""
    expert_shards: int
    expert_split: int
    """Tensor-parallel ranks that share each matrix of an expert."""


def weight_groups(plan: Plan, software: Software) -> WeightGroups:
    """Who has the same weights under a plan."""
    dp, cp, ep = plan.dp or 1, plan.cp, plan.ep
    split = plan.tp if software.splits_experts or ep == 1 else 1
    copies = max(1, dp * cp * plan.tp // (ep * split))
    dense_shards, expert_shards = (dp * cp, copies) if software.shards_context else (dp, max(1, copies // cp))
    if software.shard_group:
        # Groups hold the same: a group that does not divide them would be another plan. Experts have groups of their own anyway.
        dense_shards = math.gcd(dense_shards, software.shard_group)
    return WeightGroups(dp * cp, copies, dense_shards, expert_shards, split)


def dense_weights(layer: Layer, plan: Plan) -> float:
    """Elements of a layer on one rank, experts left out."""
    return layer.whole_weights + layer.split_weights / plan.tp


def expert_weights(layer: Layer, plan: Plan, sharing: WeightGroups) -> float:
    """Elements of a layer's experts on one rank."""
    return layer.expert_weights / (plan.ep * (sharing.expert_split if layer.cuts_experts else 1))


def layer_weights(layer: Layer, plan: Plan, software: Software) -> float:
    """Elements of a layer on one rank."""
    return dense_weights(layer, plan) + expert_weights(layer, plan, weight_groups(plan, software))
