"""What one compressed sum moves, from sizes alone: to the call and to the byte, as channels count it.

``verify`` compares it with what was counted. Only ``threshold`` sends as much as its values are large; there the number of
elements that were sent is asked for.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from shoal.comm.ordered import ordered_traffic
from shoal.comm.trafficcounter import Traffic, TrafficCounts, add_traffic
from shoal.compression.build import build_back, build_codec
from shoal.compression.codec import Codec, nbytes
from shoal.compression.config import CompressionConfig, has_residual
from shoal.compression.dgc import ratio_at
from shoal.compression.layout import (
    Owned,
    TensorPart,
    block_of,
    cut_as_owned,
    cut_block,
    cut_evenly,
    factor_rank,
    is_compressed,
    message_bytes,
    way_of,
)
from shoal.compression.sparse import TopK
from shoal.core.compressrule import CompressRule

BUCKET_ELEMENTS = 4 * 2**20
"""Elements of dense tensors that are packed into one message."""
_FLOAT = 4
_COUNT = 8


@dataclass(frozen=True, kw_only=True)
class Link:
    """What traffic depends on in the channel."""

    axis: str
    num_ranks: int
    has_order: bool
    """It adds in the order of ranks by itself (``comm/ordered.py``)."""


def sum_traffic(
    parts: Mapping[str, TensorPart],
    rule: CompressRule,
    config: CompressionConfig,
    link: Link,
    *,
    step: int,
    owned: Owned | None = None,
    names: Collection[str] | None = None,
    sent_counts: Sequence[int] = (),
) -> TrafficCounts:
    """What one ``CompressedSum.sum_`` of step number ``step`` counts on any rank.

    Args:
        parts: what each rank holds of each parameter.
        rule: the plan's ``compress``.
        config: the ``[compression]`` section.
        link: the channel.
        step: number of the step.
        owned: as ``CompressedSum`` has it.
        names: the parameters that are summed; None for all.
        sent_counts: for ``threshold``, the elements of each tensor that each rank sent.
    """
    if link.num_ranks == 1:
        return {}
    given = {name: part for name, part in sorted(parts.items()) if names is None or name in names}
    large = {
        name: part for name, part in given.items() if step >= rule.start and is_compressed(part.shape, rule, config)
    }
    found = _dense([part.size for name, part in given.items() if name not in large], link)
    if not large:
        return found
    codec = build_codec(rule, config)
    match way_of(rule):
        case "blocks":
            assert codec is not None
            compressed = {name: part for name, part in sorted(parts.items()) if is_compressed(part.shape, rule, config)}
            back = build_back(rule, config) if owned is None else None
            return add_traffic(found, _blocks(compressed, large, codec, back, link, owned))
        case "selected":
            return add_traffic(found, _selected(large, rule, config, link, step, sent_counts))
        case "random":
            assert codec is not None
            sizes = (nbytes(codec, part.size, part.offset) for part in large.values())
            return add_traffic(found, _summed(sum(sizes), link))
    ranks = [factor_rank(part.shape, int(rule.number)) for part in large.values()]
    lefts, rights = sum(rows * rank for rows, _, rank in ranks), sum(cols * rank for _, cols, rank in ranks)
    return add_traffic(found, _summed(_FLOAT * lefts, link), _summed(_FLOAT * rights, link))


def state_bytes(
    parts: Mapping[str, TensorPart],
    rule: CompressRule,
    config: CompressionConfig,
    *,
    num_ranks: int,
    rank: int,
    is_sharded: bool = False,
) -> int:
    """Bytes of the state on one rank, with those of the next state, which is made beside it.

    Args:
        parts: what each rank holds of each parameter.
        rule: the plan's ``compress``.
        config: the ``[compression]`` section.
        num_ranks: ranks that sum.
        rank: which of them.
        is_sharded: under ZeRO, where sums stay with their owners.
    """
    compressed = {name: part for name, part in sorted(parts.items()) if is_compressed(part.shape, rule, config)}
    elements = sum(part.size for part in compressed.values())
    copies = 2 if rule.kind == "dgc" else int(has_residual(rule, config))
    total = copies * elements
    back = build_back(rule, config) if way_of(rule) == "blocks" and not is_sharded else None
    if has_residual(rule, config) and back is not None:
        codec = build_codec(rule, config)
        assert codec is not None
        total += sum(piece.numel for piece in cut_evenly(compressed, num_ranks, cut_block(codec, back))[rank])
    if way_of(rule) == "factors":
        for part in compressed.values():
            _, cols, width = factor_rank(part.shape, int(rule.number))
            total += cols * width
    return 2 * _FLOAT * total


def _dense(sizes: Sequence[int], link: Link) -> TrafficCounts:
    found: TrafficCounts = {}
    bucket = 0
    for size in sizes:
        if bucket and bucket + size > BUCKET_ELEMENTS:
            found, bucket = add_traffic(found, _summed(_FLOAT * bucket, link)), 0
        bucket += size
    return add_traffic(found, _summed(_FLOAT * bucket, link))


def _summed(num_bytes: int, link: Link) -> TrafficCounts:
    return ordered_traffic(link.axis, num_bytes, has_order=link.has_order, num_ranks=link.num_ranks)


def _blocks(
    compressed: Mapping[str, TensorPart],
    given: Collection[str],
    codec: Codec,
    back: Codec | None,
    link: Link,
    owned: Owned | None,
) -> TrafficCounts:
    cut = (
        cut_evenly(compressed, link.num_ranks, cut_block(codec, back))
        if owned is None
        else cut_as_owned(compressed, owned, block_of(codec))
    )
    pieces = [[piece for piece in owner if piece.name in given] for owner in cut]
    encoded = sum(message_bytes(codec, owner) for owner in pieces)
    found = {(link.axis, "all_to_all"): Traffic(calls=1, num_bytes=encoded)}
    if owned is None:
        returned = (
            _FLOAT * sum(piece.numel for owner in pieces for piece in owner)
            if back is None
            else sum(message_bytes(back, owner) for owner in pieces)
        )
        found[link.axis, "all_gather"] = Traffic(calls=1, num_bytes=returned)
    return found


def _selected(
    large: Mapping[str, TensorPart],
    rule: CompressRule,
    config: CompressionConfig,
    link: Link,
    step: int,
    sent_counts: Sequence[int],
) -> TrafficCounts:
    key = (link.axis, "all_gather")
    if rule.kind == "threshold":
        told = Traffic(calls=1, num_bytes=_COUNT * len(large) * link.num_ranks)
        sent = Traffic(calls=1, num_bytes=2 * _FLOAT * sum(sent_counts))
        return {key: told + sent if sent.num_bytes else told}
    ratio = ratio_at(step - rule.start, rule.number, config.warmup) if rule.kind == "dgc" else rule.number
    own = sum(nbytes(TopK(ratio), part.size) for part in large.values())
    return {key: Traffic(calls=1, num_bytes=own * link.num_ranks)}
