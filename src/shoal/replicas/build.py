"""From the plan's ``sync`` to the policy that carries it out."""

from collections.abc import Sequence

from shoal.core.syncrule import SyncRule
from shoal.replicas.averaging import Averaging
from shoal.replicas.choco import CompressedGossip
from shoal.replicas.config import ReplicaConfig
from shoal.replicas.easgd import ElasticAveraging
from shoal.replicas.gossip import Gossip
from shoal.replicas.policy import Island, Policy
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
