"""An unmodified Hugging Face model, named by a recipe, planned for and simulated on a cluster that is not there."""

from pathlib import Path

import pytest

from shoal.core.errors import RequestError
from shoal.tuning.planning import PlanRequest, plan_for
from shoal.tuning.simulation import price_asked
from shoal.tuning.simulation_request import SimulationRequest, read_simulation

pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parents[3] / "examples"
LARGE = ("model.args.layers=24", "model.args.hidden=2048", "model.args.heads=16", "data.sequence=1024")


class NoOwnParts:
    """Nothing may be built with memory."""

    def measure_data(self, recipe):
        raise AssertionError

    def check_plan(self, recipe, plan):
        raise AssertionError


@pytest.fixture
def recipe(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    return EXAMPLES / "hugging_face.toml"


@pytest.mark.soak
def test_a_gpt2_of_a_billion_weights_is_planned_for(recipe):
    request = PlanRequest(
        recipe=recipe, cluster="v100-16gb:4x8", global_batch=64, overrides=(*LARGE, "train.precision=float16"),
        why_not="tp=4 sp=true pp=2", top=3,
    )  # fmt: skip
    answer = plan_for(request, own=NoOwnParts())
    chain = answer.job.chain
    # Twelve squares of the width in a block, tied ends, and biases and norms.
    assert chain.weights == pytest.approx(24 * 12 * 2048**2, rel=0.01) and chain.num_blocks == 24
    assert (chain.heads, chain.tokens) == (16, 1024.0)
    assert answer.found.ranked and all(one.fits and one.plan.world_size == 32 for one in answer.found.ranked)
    assert answer.asked is not None and answer.asked.plan.tp == 4 and answer.why_not


def test_tensor_and_sequence_parallelism_are_searched_though_nothing_has_values(recipe):
    """Before, a module of one's own was said to mix positions, which is asked by values: no plan with tp was ever tried."""
    request = PlanRequest(recipe=recipe, cluster="v100-16gb:1x8", global_batch=1, overrides=LARGE, top=3)
    answer = plan_for(request, own=NoOwnParts())
    assert any(one.plan.tp > 1 and one.plan.sp for one in answer.found.ranked)
    assert "only running the module can tell" in answer.warnings[0]


def test_heads_that_tp_does_not_divide_are_answered_by_the_rule(recipe):
    request = PlanRequest(recipe=recipe, cluster="h100:1x8", global_batch=64, why_not="tp=8")
    answer = plan_for(request, own=NoOwnParts())
    assert answer.asked is None and "tp=8 does not divide the 4 heads" in " ".join(answer.why_not)


def test_it_is_simulated_and_held_to_its_heads(recipe):
    def price(plan):
        asked = SimulationRequest(recipe=recipe, cluster="h100:1x8", plan=plan)
        return price_asked(read_simulation(asked, own=NoOwnParts()))

    assert len(price("tp=2 pp=2").parts.stages) == 2
    with pytest.raises(RequestError, match="tp=8 does not divide the 4 heads"):
        price("tp=8")
