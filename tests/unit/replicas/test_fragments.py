"""How a model is cut into the fragments of ``stream``."""

import pytest
import torch

from shoal.comm.channel import Channel
from shoal.comm.trafficcounter import TrafficCounter
from shoal.core.placement import place_whole
from shoal.core.syncrule import SyncRule
from shoal.engine.islands.together import Islands
from shoal.engine.state import RankState
from shoal.engine.stop import StopRequest
from shoal.replicas.build import build_policy
from shoal.replicas.config import ReplicaConfig
from shoal.replicas.fragments import count_layers, cut_fragments
from shoal.replicas.policy import Island
from shoal.verify.oracle.fragments import fragments_of

BLOCK = {"attention.key.weight": 16, "attention.norm.weight": 1, "mlp.up.weight": 64, "mlp.up.bias": 4}
GPT = {f"blocks.{number}.{name}": size for number in range(12) for name, size in BLOCK.items()}
GPT |= {"embedding.weight": 40, "norm.weight": 1}
OTHER = [
    "0.weight",
    "0.bias",
    "2.0.weight",
    "2.1.weight",
    "10.weight",
    "scale",
    "encoder.layers.3.w",
    "encoder.norm.bias",
]


@pytest.mark.parametrize("count", [1, 3, 4, 12])
def test_fragments_are_whole_layers_in_turn_and_of_like_size(count):
    """By single parameters in the order of names a fragment had almost nothing where their number in a block divided so."""
    found = cut_fragments(GPT, count)
    assert sorted(name for one in found for name in one) == sorted(GPT)
    for number in range(12):
        assert {f"blocks.{number}.{name}" for name in BLOCK} <= found[number % count], "by number, and not 1, 10, 11, 2"
    sizes = [sum(GPT[name] for name in one) for one in found]
    assert max(sizes) - min(sizes) <= 40


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_oracle_cuts_alike(count):
    for names in (list(GPT), OTHER):
        assert [sorted(one) for one in cut_fragments(names, count)] == fragments_of(names, count)
    assert count_layers(OTHER) == 6


def test_a_checkpoint_with_other_fragments_is_taken_up_by_its_mean_and_says_so():
    channel = Channel("islands", rank=0, size=1, transport=None, traffic=TrafficCounter())
    weights, rule, config = {"a.weight": torch.ones(3)}, SyncRule.parse("stream:4,1,2"), ReplicaConfig()
    islands = Islands(
        rule=rule,
        config=config,
        policy=build_policy(Island(channel=channel, weights=weights, seed=1), rule, config, order=list(weights)),
        channel=channel,
        inside=channel,
        weights=weights,
        placements={"a.weight": place_whole((3,))},
        buffers={},
        saved_names={"a.weight": "a.weight"},
        seed=1,
        stop=StopRequest(),
        device=torch.device("cpu"),
        publish=lambda: None,
        forget=lambda: None,
    )
    own = RankState(
        tensors={"weights/a.weight": weights["a.weight"]},
        placements={"weights/a.weight": place_whole((3,))},
        all_weights=frozenset({"weights/a.weight"}),
        has_updates=True,
    )
    saved = set(islands.to_save(own).tensors)
    assert islands.to_load(own, saved)[1]
    before = {key for key in saved if not key.endswith("/layers")}
    assert before != saved and not islands.to_load(own, before)[1]
    assert "fragments of single parameters" in islands.went_on(is_same=False)
