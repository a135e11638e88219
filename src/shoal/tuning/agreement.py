"""How the replicas of a plan agree, as the planner prices it: traffic from the functions that a run's counters are held to.

Between islands that is ``replicas/traffic.py``, for a compressed sum the sizes of ``compression/``. Both know exact shapes where
the recipe's module was traced. What tensor parallelism and ZeRO leave to one rank is taken as an even share.
"""

import math
from collections.abc import Collection, Mapping, Sequence

from shoal.comm.trafficcounter import TrafficCounts, add_traffic
from shoal.compression.build import build_codec
from shoal.compression.config import CompressionConfig
from shoal.compression.layout import TensorPart, is_compressed
from shoal.compression.traffic import Link, state_bytes, sum_traffic
from shoal.core.axes import Axis
from shoal.core.compressrule import CompressRule
from shoal.core.errors import RequestError
from shoal.core.plan import Plan
from shoal.core.syncrule import SyncRule
from shoal.planner.pricing.agreement import Agreement, is_exact, rank_shapes, updated_share
from shoal.planner.pricing.codecs import CodecWork, codec_work
from shoal.planner.pricing.job import Job
from shoal.replicas.choco import coded_bytes
from shoal.replicas.fragments import check_fragments, cut_fragments
from shoal.replicas.graphs import mixing
from shoal.replicas.memory import policy_copies
from shoal.replicas.traffic import TOLD_EVERY, Sizes, step_traffic, tells_stop

Shapes = Mapping[str, tuple[int, ...]]
_LONGEST = 100_000
"""Steps between rounds that are priced: each step of a cycle has its traffic."""


def agreement_of(
    job: Job,
    plan: Plan,
    *,
    compression: CompressionConfig,
    sparse_bits: int = 32,
    seed: int = 0,
    step_seconds: float | None = None,
) -> Agreement | None:
    """How the replicas of a plan agree; None where they sum whole gradients at every step.

    Args:
        job: what is trained, and on what.
        plan: how, with its islands named.
        compression: the recipe's section.
        sparse_bits: of each value that ``sync=sparse`` sends, from the recipe's ``[replicas]``.
        seed: of the run, for graphs that are drawn.
        step_seconds: of an island's step, for rounds that come by the clock.
    """
    if is_exact(plan):
        return None
    shapes = rank_shapes(job, plan)
    if plan.islands > 1:
        return _between_islands(
            job, plan, shapes, compression, sparse_bits=sparse_bits, seed=seed, step_seconds=step_seconds
        )
    assert plan.compress is not None
    rule = CompressRule.parse(plan.compress)
    return _compressed_sum(plan, rule, shapes, compression)


def _between_islands(
    job: Job,
    plan: Plan,
    shapes: Shapes,
    config: CompressionConfig,
    *,
    sparse_bits: int,
    seed: int,
    step_seconds: float | None,
) -> Agreement:
    """Rounds of a policy, and what they compress."""
    rule = SyncRule.parse(plan.sync)
    compress = CompressRule.parse(plan.compress) if plan.compress is not None else None
    period = _period(plan, rule, step_seconds)
    share = updated_share(job, plan)
    elements = {name: max(1, round(math.prod(shape) * share)) for name, shape in sorted(shapes.items())}
    names = [name for layer in job.chain.layers for name, _ in layer.shapes]
    check_fragments(rule, names)
    fragments = cut_fragments(names, rule.fragments)
    messages = _Messages(
        plan, rule, compress, config, elements, shapes, fragments, round(job.weight_bytes), sparse_bits, seed
    )
    # From a step on at which everything has begun: rounds, all fragments of a stream, compression.
    skipped = max(rule.start, (compress.start + config.warmup if compress else 0) + period * (1 + bool(rule.delay)))
    first = rule.start + -(-(skipped - rule.start) // period) * period
    length = math.lcm(period, min(TOLD_EVERY, period)) if rule.seconds is None else period
    steps = [messages.of_step(step, period) for step in range(first, first + length)]
    updated = float(sum(elements.values()))
    kept = policy_copies(rule.kind, is_compressed=compress is not None) * updated * job.weight_bytes
    # Of gossip the copies are all that it remembers: its messages are coded without sums.
    if compress is not None and rule.graph is None:
        parts = messages.parts(elements)
        kept += state_bytes(parts, compress, config, num_ranks=plan.islands, rank=0)
    return Agreement(
        cycle=tuple(counts for counts, _, _ in steps),
        work=tuple(work for _, work, _ in steps),
        touched=tuple(touched for _, _, touched in steps),
        kept_bytes=kept,
        delay=rule.delay,
    )


def _period(plan: Plan, rule: SyncRule, step_seconds: float | None) -> int:
    """Steps between rounds; of rounds by the clock, as many as fit."""
    if rule.seconds is not None:
        return min(_LONGEST, max(1, round(rule.seconds / step_seconds))) if step_seconds else 1
    if rule.period > _LONGEST:
        raise RequestError(
            f"plan {str(plan)!r}: rounds are {rule.period} steps apart, and {_LONGEST} are priced at most; give fewer"
        )
    return rule.period


class _Messages:
    """What one rank sends to other islands, by step; steps that are alike are worked out once."""

    def __init__(
        self,
        plan: Plan,
        rule: SyncRule,
        compress: CompressRule | None,
        config: CompressionConfig,
        elements: Mapping[str, int],
        shapes: Shapes,
        fragments: Sequence[Collection[str]],
        item_bytes: int,
        bits: int,
        seed: int,
    ) -> None:
        self._plan, self._rule, self._compress, self._config = plan, rule, compress, config
        self._elements, self._shapes, self._fragments = elements, shapes, fragments
        self._item_bytes, self._bits, self._seed = item_bytes, bits, seed
        self._known: dict[object, tuple[TrafficCounts, CodecWork, float]] = {}

    def parts(self, names: Collection[str]) -> dict[str, TensorPart]:
        """What the rank updates of some parameters, by their whole shapes."""
        return {name: TensorPart(self._shapes[name], 0, self._elements[name]) for name in names}

    def of_step(self, step: int, period: int) -> tuple[TrafficCounts, CodecWork, float]:
        """Traffic, codec's work and elements of the round that follows step number ``step``."""
        rule = self._rule
        # Rounds by the clock are priced as if they came every so many steps.
        is_round = rule.is_round(step) if rule.seconds is None else (step - rule.start + 1) % period == 0
        round_number = (step - rule.start) // period if rule.graph is not None else 0
        place = (step - rule.start) % period if rule.kind == "stream" else 0
        key = (is_round, tells_stop(rule, step, is_round=is_round), place, round_number)
        if key not in self._known:
            self._known[key] = self._work_out(step, is_round=is_round, round_number=round_number)
        return self._known[key]

    def _work_out(self, step: int, *, is_round: bool, round_number: int) -> tuple[TrafficCounts, CodecWork, float]:
        rule, plan = self._rule, self._plan
        matrix = None
        if rule.graph is not None and is_round:
            directed = rule.kind == "pushsum"
            matrix = mixing(rule.graph, plan.islands, round_number, seed=self._seed, is_directed=directed)

        def traffic(names: Collection[str]) -> TrafficCounts:
            held = {name: self._elements[name] for name in self._elements if name in names}
            sizes = Sizes(
                elements=held,
                item_bytes=self._item_bytes,
                fragments=self._fragments,
                islands=plan.islands,
                inside=plan.world_size // plan.islands,
                sparse_bits=self._bits,
                message_bytes=message,
            )
            has_order = plan.islands <= 2
            return step_traffic(rule, step, sizes, is_round=is_round, has_order=has_order, place=0, matrix=matrix)

        message, work = None, CodecWork()
        if matrix is not None and self._compress is not None:
            message, work = self._coded_message(self._compress, sum(map(bool, matrix[0])))
        # Without any weights only what islands tell each other is left.
        told = traffic(())
        due = [names for names in self._turns(is_round=is_round) if traffic(names) != told]
        sent = {name for names in due for name in names}
        touched = float(sum(self._elements[name] for name in sent))
        if rule.kind == "sparse" and sent:
            # All islands' payloads are decoded, its own among them.
            work = CodecWork(touched, plan.islands * touched)
        if self._compress is None or rule.graph is not None or not sent:
            return traffic(self._elements), work, touched
        parts = self.parts(sent)
        compress, config = self._compress, self._config
        link = Link(axis=Axis.ISLAND.value, num_ranks=plan.islands, has_order=plan.islands <= 2)
        sums = sum_traffic(parts, compress, config, link, step=step, sent_counts=_guess(parts, compress, config))
        large = sum(part.size for part in parts.values() if is_compressed(part.shape, compress, config))
        work = codec_work(compress, config, large, num_ranks=plan.islands, is_sharded=False)
        return add_traffic(told, sums), work, touched

    def _coded_message(self, rule: CompressRule, num_heard: int) -> tuple[int, CodecWork]:
        """Bytes of a message of gossip, and what coding it and those of so many islands takes, this one among them."""
        codec = build_codec(rule, self._config)
        assert codec is not None, "the plan's check refuses codecs of whole matrices with gossip"
        coded = {name for name, shape in self._shapes.items() if is_compressed(shape, rule, self._config)}
        size = sum(
            coded_bytes(codec, count) if name in coded else count * self._item_bytes
            for name, count in self._elements.items()
        )
        elements = sum(self._elements[name] for name in coded)
        return size, CodecWork(elements, num_heard * elements)

    def _turns(self, *, is_round: bool) -> list[list[str]]:
        """Parameters that are sent together: fragments of a stream, or all."""
        if self._rule.kind != "stream":
            return [list(self._elements)] if is_round else []
        return [[name for name in self._elements if name in fragment] for fragment in self._fragments]


def _compressed_sum(plan: Plan, rule: CompressRule, shapes: Shapes, config: CompressionConfig) -> Agreement:
    """A compressed sum of gradients at every step, from the rule's first step on."""
    num_ranks = (plan.dp or 1) * plan.cp
    parts = {name: TensorPart(shape) for name, shape in shapes.items()}
    owned = _owned(shapes, num_ranks) if plan.zero else None
    # The names that channels have: ZeRO shards along dp alone.
    link = Link(axis=Axis.DATA.value if plan.zero else "replicas", num_ranks=num_ranks, has_order=num_ranks <= 2)
    step = rule.start + config.warmup
    counts = sum_traffic(parts, rule, config, link, step=step, owned=owned, sent_counts=_guess(parts, rule, config))
    elements = sum(math.prod(shape) for shape in shapes.values() if is_compressed(shape, rule, config))
    work = codec_work(rule, config, elements, num_ranks=num_ranks, is_sharded=plan.zero > 0)
    kept = state_bytes(parts, rule, config, num_ranks=num_ranks, rank=0, is_sharded=plan.zero > 0)
    return Agreement(cycle=(counts,), work=(work,), touched=(0.0,), kept_bytes=kept)


def _guess(parts: Mapping[str, TensorPart], rule: CompressRule, config: CompressionConfig) -> list[int]:
    """Elements that a threshold lets through: nobody knows before the values are there; one in a hundred."""
    return [part.size // 100 for part in parts.values() if is_compressed(part.shape, rule, config)]


def _owned(shapes: Shapes, num_ranks: int) -> list[dict[str, tuple[int, int]]]:
    """The elements of each parameter that each rank of ZeRO has, in whole rows."""
    found: list[dict[str, tuple[int, int]]] = [{} for _ in range(num_ranks)]
    for name, shape in shapes.items():
        rows = shape[0] if shape else 1
        width = math.prod(shape[1:])
        for rank, own in enumerate(found):
            own[name] = (rows * rank // num_ranks * width, rows * (rank + 1) // num_ranks * width)
    return found
