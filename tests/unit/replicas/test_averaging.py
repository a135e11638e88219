"""Outer steps against torch's own optimizer, in one process: a second implementation beside the oracle of ``verify``."""

import itertools
import math

import pytest
import torch

from shoal.comm.channel import Channel
from shoal.comm.trafficcounter import TrafficCounter
from shoal.core.errors import RequestError
from shoal.core.syncrule import SyncRule
from shoal.optim.config import OptimConfig
from shoal.optim.rates import rate
from shoal.replicas.build import build_policy
from shoal.replicas.config import ReplicaConfig
from shoal.replicas.intervals import Interval, adacomm_interval
from shoal.replicas.policy import Island, StepEnd


def alone(weights):
    channel = Channel("islands", rank=0, size=1, transport=None, traffic=TrafficCounter())
    return Island(channel=channel, weights=weights, seed=1)


def run(rule, steps, config=None, dtype=torch.float64):
    """The weights after so many steps of a walk that is drawn, under a policy of one island."""
    generator = torch.Generator().manual_seed(7)
    weights = {name: torch.randn(5, generator=generator, dtype=dtype) for name in "ab"}
    policy = build_policy(
        alone(weights), SyncRule.parse(rule), config or ReplicaConfig(mixing=0.0), order=sorted(weights)
    )
    for step in range(steps):
        policy.before_update()
        for weight in weights.values():
            weight.sub_(0.1 * torch.randn(5, generator=generator, dtype=dtype))
        policy.after_update(StepEnd(step=step, lr=0.1, is_round=SyncRule.parse(rule).is_round(step)))
    return weights


def test_the_outer_step_of_diloco_is_torchs_nesterov():
    generator = torch.Generator().manual_seed(7)
    start = {name: torch.randn(5, generator=generator, dtype=torch.float64) for name in "ab"}
    agreed = {name: value.clone().requires_grad_() for name, value in start.items()}
    outer = torch.optim.SGD(agreed.values(), lr=0.7, momentum=0.5, nesterov=True)
    live = {name: value.clone() for name, value in start.items()}
    for step in range(9):
        for weight in live.values():
            weight.sub_(0.1 * torch.randn(5, generator=generator, dtype=torch.float64))
        if step % 3 == 2:
            for name, weight in live.items():
                agreed[name].grad = agreed[name].detach() - weight
            outer.step()
            live = {name: value.detach().clone() for name, value in agreed.items()}
    found = run("diloco:3", 9)
    for name, weight in live.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-13, atol=1e-15)


def test_streaming_with_one_fragment_and_no_delay_is_diloco_bit_for_bit():
    config = ReplicaConfig(mixing=0.0, outer_momentum=0.8)
    diloco, stream = (run(rule, 10, config, dtype=torch.float32) for rule in ("diloco:3", "stream:3,1,0"))
    assert all(torch.equal(diloco[name], stream[name]) for name in diloco)


@pytest.mark.parametrize(("rule", "momentum"), [("diloco:3", 0.5), ("stream:3,1,0", 0.9)])
def test_the_outer_momentum_that_is_left_out_is_the_policys(rule, momentum):
    left_out, given = run(rule, 10), run(rule, 10, ReplicaConfig(mixing=0.0, outer_momentum=momentum))
    other = run(rule, 10, ReplicaConfig(mixing=0.0, outer_momentum=0.7))
    assert all(
        torch.equal(left_out[name], given[name]) and not torch.equal(left_out[name], other[name]) for name in given
    )


def test_more_fragments_than_layers_are_refused():
    with pytest.raises(
        RequestError, match="4 fragments of whole layers, and 2 of its layers have trained parameters; use 2"
    ):
        run("stream:8,4,1", 1)


def test_slow_momentum_without_momentum_is_the_mean():
    config = ReplicaConfig(slow_momentum=0.0, slow_lr=1.0)
    slow, plain = run("slowmo:3", 6, config), run("local:3", 6, config)
    for name in slow:
        torch.testing.assert_close(slow[name], plain[name], rtol=1e-13, atol=1e-15)


def test_rounds_come_closer_as_the_loss_falls():
    """AdaComm: H = ceil(H_0 sqrt(F / F_0)); without a loss, or with one that is no number, H_0."""
    assert [adacomm_interval(16, 4.0, now) for now in (4.0, 1.0, 0.9, 0.01, 9.0)] == [16, 8, 8, 1, 24]
    assert adacomm_interval(16, math.nan, math.nan) == adacomm_interval(16, 4.0, math.inf) == 16
    interval = Interval(SyncRule.parse("local:4"), ReplicaConfig(interval="adacomm"))
    for loss in (math.nan, 4.0, 1.0):
        interval.evaluated(loss)
    assert [interval.is_due(0, lr=0.1, since=since) for since in (1, 2, 3)] == [False, True, True]
    assert interval.numbers()["losses"].tolist() == [4.0, 1.0]


def quadratic_rounds(*, warmup, resume_at=None):
    """The steps after which a round is held in 300 steps of a cosine, and the interval that a checkpoint took on."""
    optim, config = OptimConfig(lr=4e-3, schedule="cosine", warmup=warmup, final=0.1), ReplicaConfig(interval="qsr")
    interval, rounds = Interval(SyncRule.parse("local:4"), config), [0]
    for step in range(300):
        if step == resume_at:
            saved = interval.numbers()["pace"]
            interval = Interval(SyncRule.parse("local:4"), config)
            interval.numbers()["pace"].copy_(saved)
        if interval.is_due(step, lr=rate(optim, step, 300), since=step + 1 - rounds[-1]):
            rounds.append(step + 1)
    return optim, rounds


def test_a_round_of_the_quadratic_rule_is_as_long_as_the_rate_at_its_start_says():
    """Gu et al. 2024: H is set when a round begins. By the rate of every step rounds ended at step 175 of these 300."""
    optim, rounds = quadratic_rounds(warmup=30)
    assert rounds[:8] == [0, 4, 8, 12, 16, 20, 24, 28], "rounds of warm-up are H_0 steps long, however small its rates"
    assert rounds[8] == 32, "a round in which warm-up ends is one of warm-up"
    for first, following in itertools.pairwise(rounds[8:]):
        assert following - first == max(4, math.floor((0.01 / rate(optim, first, 300)) ** 2))
    assert rounds[-1] > 175 + 20
    assert quadratic_rounds(warmup=0)[1][1] == 6, (
        "without warm-up the first round is by the first rate: (0.01 / 0.004)^2"
    )
    assert quadratic_rounds(warmup=30, resume_at=190)[1] == rounds, "a resume in the middle of a round keeps its length"


@pytest.mark.parametrize("rule", ["local:1", "diloco:1", "slowmo:1", "stream:1,1,0"])
def test_an_island_without_samples_weighs_nothing_and_is_not_left_out(rule):
    """An epoch's last batch may have fewer samples than there are islands: that is no reason to call one not finite."""
    weights = {"a": torch.ones(3)}
    config = ReplicaConfig(weigh="samples", mixing=0.0)
    policy = build_policy(alone(weights), SyncRule.parse(rule), config, order=["a"])
    weights["a"].sub_(0.5)
    policy.after_update(StepEnd(step=0, lr=0.1, is_round=True, samples=0))
    assert policy.left_out == ()
    assert torch.equal(weights["a"], torch.ones(3)), "nothing was learnt from no sample"
