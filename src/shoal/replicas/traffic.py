"""What a policy moves between islands after one step, from the sizes alone: to the call and to the byte.

The counts are those of one rank's channel to the ranks of equal coordinates in the other islands (``comm/trafficcounter.py``
says what a byte of each operation is). ``verify`` compares them with what was counted.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from shoal.comm.trafficcounter import Traffic, TrafficCounts, add_traffic
from shoal.compression.exchange import CompressedSum
from shoal.core.axes import Axis
from shoal.core.syncrule import SyncRule
from shoal.replicas.exchange import BUCKET_ELEMENTS
from shoal.replicas.graphs import Matrix
from shoal.replicas.shards import WholeBlocks
from shoal.replicas.sparse import payload_bytes

TOLD_EVERY = 10
"""Steps after which islands ask each other whether to stop, where rounds are not held more often."""

_AXIS = Axis.ISLAND.value
_NUMBER_BYTES = 8
_FLAG_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What one rank updates."""

    elements: Mapping[str, int]
    """Of each parameter, or of the rows that are this rank's, by name in the order of names."""
    item_bytes: int
    fragments: Sequence[Collection[str]]
    """The parameters of each fragment, of the whole model."""
    islands: int
    inside: int
    """Ranks of an island."""
    message_bytes: int | None = None
    """Of a message of gossip, where it is compressed."""
    sparse_bits: int = 32
    """Of each value, where the rule is sparse."""


def tells_stop(rule: SyncRule, step: int, *, is_round: bool) -> bool:
    """True when islands ask each other after this step whether to stop: at rounds of the whole model, and every few steps."""
    often = 1 if rule.seconds is not None else min(TOLD_EVERY, rule.period)
    return (is_round and rule.kind != "stream") or (step + 1) % often == 0


def step_traffic(
    rule: SyncRule,
    step: int,
    sizes: Sizes,
    *,
    is_round: bool,
    has_order: bool,
    place: int = 0,
    matrix: Matrix | None = None,
    sums: CompressedSum | None = None,
    shards: WholeBlocks | None = None,
) -> TrafficCounts:
    """What one rank sends to other islands in step number ``step``, counted from 0.

    Args:
        rule: of the plan.
        step: its number.
        sizes: of what the rank updates.
        is_round: a round is held.
        has_order: the channel adds in the order of ranks by itself.
        place: of the rank's island, for gossip.
        matrix: the weights of this round's graph, for gossip.
        sums: what changes went through in the last round, where they go compressed.
        shards: what made whole blocks of them, where ZeRO has cut them.
    """
    found: TrafficCounts = {}
    everything = list(sizes.elements.values())
    if step < rule.start:
        found = summed_traffic(everything, sizes.item_bytes, has_order=has_order)
    elif rule.kind == "stream":
        for fragment in rule.fragments_sent(step):
            widened = {} if shards is None else shards.forecast_traffic(sizes.fragments[fragment])
            found = add_traffic(found, _looked(sizes), widened)
        # A fragment is counted in the step that waits for it.
        for fragment in rule.fragments_applied(step):
            part = [count for name, count in sizes.elements.items() if name in sizes.fragments[fragment]]
            dense = summed_traffic(part, sizes.item_bytes, has_order=has_order)
            found = add_traffic(found, _told(sizes), dense if sums is None else sums.forecast_traffic())
    elif is_round and matrix is not None:
        receivers = sum(bool(matrix[other][place]) for other in range(len(matrix)) if other != place)
        message = sizes.message_bytes
        sent = receivers * (sum(everything) * sizes.item_bytes if message is None else message)
        calls = 2 if rule.kind == "pushsum" else 1
        numbers = receivers * _NUMBER_BYTES if rule.kind == "pushsum" else 0
        found = {(_AXIS, "all_to_all"): Traffic(calls=calls, num_bytes=sent + numbers)}
    elif is_round and rule.kind == "sparse":
        own = payload_bytes(everything, rule.keep, bits=sizes.sparse_bits, item_bytes=sizes.item_bytes)
        gathered = {(_AXIS, "all_gather"): Traffic(calls=1, num_bytes=own * sizes.islands)}
        found = add_traffic(_looked(sizes), _told(sizes), gathered)
    elif is_round:
        summed = summed_traffic(everything, sizes.item_bytes, has_order=has_order)
        if sums is not None:
            summed = sums.forecast_traffic()
        if shards is not None:
            summed = add_traffic(summed, shards.forecast_traffic())
        found = add_traffic(_looked(sizes), _told(sizes), summed)
    if rule.seconds is not None and step >= rule.start:
        found = add_traffic(found, {(_AXIS, "all_reduce_max"): Traffic(calls=1, num_bytes=_FLAG_BYTES)})
    if tells_stop(rule, step, is_round=is_round and step >= rule.start):
        found = add_traffic(found, {(_AXIS, "all_reduce_max"): Traffic(calls=1, num_bytes=_FLAG_BYTES)})
    return found


def _looked(sizes: Sizes) -> TrafficCounts:
    """The ranks of an island tell each other whether its change is finite."""
    if sizes.inside == 1:
        return {}
    return {("everyone", "all_reduce_max"): Traffic(calls=1, num_bytes=_FLAG_BYTES)}


def _told(sizes: Sizes) -> TrafficCounts:
    """Islands tell each other their shares in a round, and which round it is."""
    return {(_AXIS, "all_reduce"): Traffic(calls=1, num_bytes=2 * _NUMBER_BYTES * sizes.islands)}


def summed_traffic(elements: Sequence[int], item_bytes: int, *, has_order: bool) -> TrafficCounts:
    """Sums over islands, in messages of as many tensors as fit."""
    calls, size = 0, 0
    for count in elements:
        if calls == 0 or size + count > BUCKET_ELEMENTS:
            calls, size = calls + 1, 0
        size += count
    moved = Traffic(calls=calls, num_bytes=sum(elements) * item_bytes)
    if not calls:
        return {}
    if has_order:
        return {(_AXIS, "all_reduce"): moved}
    return {(_AXIS, "all_to_all"): moved, (_AXIS, "all_gather"): moved}
