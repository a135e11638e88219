"""From the plan's ``sync`` to the policy that carries it out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.comm.channel import Channel
from shoal.compression.build import build_back, build_codec
from shoal.compression.config import CompressionConfig
from shoal.compression.exchange import CompressedSum
from shoal.compression.layout import TensorPart, cut_block, is_compressed, way_of
from shoal.core.compressrule import CompressRule
from shoal.core.placement import Placement
from shoal.core.syncrule import SyncRule
from shoal.replicas.averaging import Averaging
from shoal.replicas.choco import CompressedGossip
from shoal.replicas.config import ReplicaConfig
from shoal.replicas.easgd import ElasticAveraging
from shoal.replicas.fragments import check_fragments
from shoal.replicas.gossip import Gossip
from shoal.replicas.policy import Coding, Island, Policy
from shoal.replicas.shards import WholeBlocks
from shoal.replicas.sparse import SparseAveraging
from shoal.replicas.streaming import Streaming


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How ZeRO has cut what a rank updates."""

    placements: Mapping[str, Placement]
    """Where what this rank holds lies in each parameter."""
    order: Sequence[str]
    """The names of all trained parameters of the whole model, in their order."""
    channel: Channel
    """The ranks that hold the other parts."""


@dataclass(frozen=True, kw_only=True)
class Codings:
    """How what islands exchange is compressed."""

    coding: Coding | None = None
    """Of the messages of gossip."""
    sums: CompressedSum | None = None
    """Of changes."""
    shards: WholeBlocks | None = None
    """Makes whole blocks of changes that ZeRO has cut."""


def build_policy(island: Island, rule: SyncRule, config: ReplicaConfig, *, order: Sequence[str]) -> Policy:
    """The policy of one rank.

    Args:
        island: this rank's place and what it updates.
        rule: of the plan.
        config: the recipe's section.
        order: the names of all trained parameters of the whole model, in their order.

    Raises:
        RequestError: the model has fewer layers than the rule has fragments.
    """
    match rule.kind:
        case "local" | "diloco" | "slowmo":
            return Averaging(island, rule, config)
        case "easgd":
            return ElasticAveraging(island, config)
        case "sparse":
            return SparseAveraging(island, rule, config)
        case "stream":
            check_fragments(rule, order)
            return Streaming(island, rule, config, order)
        case _:
            return Gossip(island, rule) if island.coding is None else CompressedGossip(island, rule, config)


def build_codings(
    rule: SyncRule,
    compress: str | None,
    config: CompressionConfig,
    weights: Mapping[str, Tensor],
    channel: Channel,
    seed: int,
    *,
    cut: Cut | None = None,
) -> Codings:
    """How what islands exchange is compressed: the messages of gossip, or the sums of changes; nothing where nothing is.

    Args:
        rule: of the plan.
        compress: the plan's.
        config: the ``[compression]`` section.
        weights: what this rank updates.
        channel: that the exchange goes through.
        seed: of the run.
        cut: how ZeRO has cut what the rank updates; None where these are whole parameters.
    """
    if compress is None:
        return Codings()
    coded, shapes = CompressRule.parse(compress), {name: tuple(weight.shape) for name, weight in weights.items()}
    if rule.kind == "gossip":
        codec = build_codec(coded, config)
        assert codec is not None, "the plan's check refuses codecs of whole matrices with gossip"
        names = frozenset(name for name, shape in shapes.items() if is_compressed(shape, coded, config))
        return Codings(coding=Coding(codec=codec, names=names, start=coded.start))
    device = next((weight.device for weight in weights.values()), torch.device("cpu"))
    shards = None if cut is None else _whole_blocks(cut, coded, config)
    parts = {name: TensorPart(shape) for name, shape in shapes.items()} if shards is None else shards.parts
    return Codings(sums=CompressedSum(parts, coded, config, channel, seed=seed, device=device), shards=shards)


def _whole_blocks(cut: Cut, rule: CompressRule, config: CompressionConfig) -> WholeBlocks:
    codec = build_codec(rule, config)
    assert codec is not None, "the plan's check refuses codecs of whole matrices with zero"
    coded = frozenset(name for name, place in cut.placements.items() if is_compressed(place.whole_shape, rule, config))
    block = cut_block(codec, build_back(rule, config)) if way_of(rule) == "blocks" else 1
    return WholeBlocks(cut.placements, coded, order=cut.order, block=block, channel=cut.channel)
