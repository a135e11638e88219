"""What ``shoal plan`` and ``shoal simulate`` say that replicas move to agree is what their channels count."""

import pytest

from shoal.comm.trafficcounter import traffic_rows
from shoal.core.plan import Plan
from shoal.planner.pricing.agreement import price_agreement
from shoal.testing.ranks import run_on_ranks
from shoal.trainer.build import build_parts
from shoal.trainer.config import Recipe, read_recipe
from shoal.trainer.loop import Trainer
from shoal.trainer.own_parts import OwnPartsHere
from shoal.tuning.agreement import agreement_of
from shoal.tuning.planning import build_job
from shoal.tuning.simulation import simulate

RECIPE = {
    "model": {"name": "gpt", "layers": 2, "hidden": 16, "heads": 2},
    "data": {"source": "synthetic", "kind": "tokens", "samples": 48, "sequence": 8, "vocab": 97},
    "train": {"steps": 60, "global_batch": 8},
    "compression": {"min_elements": 256},
    "replicas": {"sparse_bits": 2},
}
PLANS = (
    "dp=2 compress=int8",
    "dp=2 compress=topk:0.05",
    "dp=2 compress=powersgd:2",
    "islands=2 dp=1 sync=diloco:3",
    "islands=2 dp=1 sync=gossip:ring",
    "islands=2 dp=1 sync=gossip:ring,2 compress=int4",
    "islands=2 dp=1 sync=sparse:3,0.1",
    "islands=2 dp=1 sync=pushsum:exponential,2",
    "islands=2 dp=1 sync=stream:4,2,1",
    # A period that those ten steps do not divide after which islands ask each other whether to stop.
    "islands=2 dp=1 sync=stream:15,3,1",
)
AXES = ("replicas", "islands")


def agree_by(recipe, job, text):
    plan = Plan.parse(text)
    bits, seed = recipe.replicas.sparse_bits, recipe.train.seed
    return plan, agreement_of(job, plan, compression=recipe.compression, sparse_bits=bits, seed=seed)


def count_cycles(world, lengths):
    """By plan: what each step moved between replicas, from the second cycle on, and the rounds of islands in both."""
    found, rounds = {}, {}
    for text, length in lengths.items():
        recipe = Recipe.model_validate(RECIPE)
        model, loss, data = build_parts(recipe)
        trainer = Trainer(
            model,
            data,
            loss=loss,
            train=recipe.train,
            optim=recipe.optim,
            compression=recipe.compression,
            replicas=recipe.replicas,
            plan=Plan.parse(text),
            world=world,
        )
        steps, counted = trainer.training_steps(), []
        for _ in range(2 * length):
            with trainer.mesh.traffic.counting() as counts:
                next(steps)
            counted.append(traffic_rows({key: each for key, each in counts.items() if key[0] in AXES}))
        steps.close()
        found[text] = counted[length:]
        rounds[text] = 0 if trainer.engine.islands is None else trainer.engine.islands.num_rounds
        trainer.engine.close()
        trainer.reporter.close()
    return found, rounds


def test_predicted_bytes_are_the_counted_ones():
    recipe = read_recipe(RECIPE, ())
    job, _ = build_job(recipe, "x86-server:2x1@ethernet-1g", own=OwnPartsHere())
    agreements = {text: agree_by(recipe, job, text) for text in PLANS}
    lengths = {text: len(agreement.cycle) for text, (_, agreement) in agreements.items()}
    (counted, rounds), other = run_on_ranks(count_cycles, 2, lengths)
    assert (counted, rounds) == other
    # A fragment's round is when it is applied, and nothing is when it is sent: after steps 16, 21, ... 56 of 60.
    assert rounds["islands=2 dp=1 sync=stream:15,3,1"] == 9
    for text, (plan, agreement) in agreements.items():
        steps = counted[text]
        assert [traffic_rows(one) for one in agreement.cycle] == steps, text
        # Of two ranks' sums a rank sends as many bytes as the sum has; of exchanges and gathers half.
        sent = sum(sent_bytes(plan, one) for one in steps) / len(steps)
        assert price_agreement(job, plan, agreement).bytes_per_step == pytest.approx(sent), text
    # A simulation says the same of a whole cycle.
    text = "islands=2 dp=1 sync=diloco:3"
    played = simulate(RECIPE, "x86-server:2x1@ethernet-1g", text).as_values()
    calls, num_bytes = (sum(one.get("islands all_reduce", [0, 0])[at] for one in counted[text]) for at in (0, 1))
    assert played["agreed"]["counted"]["islands all_reduce"] == [calls, num_bytes]


def sent_bytes(plan, rows):
    half = 1.0 if "gossip" in plan.sync or "pushsum" in plan.sync else 0.5
    return sum(num_bytes * (1.0 if "all_reduce" in key else half) for key, (_, num_bytes) in rows.items())
