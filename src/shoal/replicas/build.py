"""From the plan's ``sync`` to the policy that carries it out."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shoal.comm.channel import Channel
from shoal.compression.build import build_codec
from shoal.compression.config import CompressionConfig
from shoal.compression.exchange import CompressedSum
from shoal.compression.layout import TensorPart, is_compressed
from shoal.core.compressrule import CompressRule
from shoal.core.syncrule import SyncRule
from shoal.replicas.averaging import Averaging
from shoal.replicas.choco import CompressedGossip
from shoal.replicas.config import ReplicaConfig
from shoal.replicas.easgd import ElasticAveraging
from shoal.replicas.gossip import Gossip
from shoal.replicas.policy import Coding, Island, Policy
from shoal.replicas.refusals import check_fragments
from shoal.replicas.sparse import SparseAveraging
from shoal.replicas.streaming import Streaming


def build_policy(island: Island, rule: SyncRule, config: ReplicaConfig, *, order: Sequence[str]) -> Policy:
    """The policy of one rank.

    Args:
        island: this rank's place and what it updates.
        rule: of the plan.
        config: the recipe's section.
        order: the names of all trained parameters of the whole model, in their order.

    Raises:
        RequestError: the model has fewer parameters than the rule has fragments.
    """
    match rule.kind:
        case "local" | "diloco" | "slowmo":
            return Averaging(island, rule, config)
        case "easgd":
            return ElasticAveraging(island, config)
        case "sparse":
            return SparseAveraging(island, rule, config)
        case "stream":
            check_fragments(rule, len(order))
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
) -> tuple[Coding | None, CompressedSum | None]:
    """How what islands exchange is compressed: the messages of gossip, or the sums of changes; both None where nothing is.

    Args:
        rule: of the plan.
        compress: the plan's.
        config: the ``[compression]`` section.
        weights: what this rank updates, which are whole parameters.
        channel: that the exchange goes through.
        seed: of the run.
    """
    if compress is None:
        return None, None
    coded, shapes = CompressRule.parse(compress), {name: tuple(weight.shape) for name, weight in weights.items()}
    if rule.kind == "gossip":
        codec = build_codec(coded, config)
        assert codec is not None, "the plan's check refuses codecs of whole matrices with gossip"
        names = frozenset(name for name, shape in shapes.items() if is_compressed(shape, coded, config))
        return Coding(codec=codec, names=names, start=coded.start), None
    device = next((weight.device for weight in weights.values()), torch.device("cpu"))
    parts = {name: TensorPart(shape) for name, shape in shapes.items()}
    return None, CompressedSum(parts, coded, config, channel, seed=seed, device=device)
