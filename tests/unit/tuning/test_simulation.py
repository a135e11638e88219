"""What a simulation asks of a model that only looking at it can tell; and expert parallelism, priced and not executed."""

import pytest

from shoal.core.errors import RequestError
from shoal.tuning.simulation import price_asked
from shoal.tuning.simulation_request import SimulationRequest, read_simulation

SHAPE = """
[planner.shape]
layers = 4
hidden = 256
heads = 8
vocab = 512
sequence = 128
experts = {experts}
"""
OWN = """
[model]
build = "support.models.custom_parts:build_logistic"
[data]
source = "digits"
[train]
steps = 1
global_batch = 16
"""


class NoOwnParts:
    """Nothing may be built with memory: a module of any size is simulated."""

    def measure_data(self, recipe):
        raise AssertionError

    def check_plan(self, recipe, plan):
        raise AssertionError


def price(path, plan, cluster="h100:8"):
    return price_asked(read_simulation(SimulationRequest(recipe=path, cluster=cluster, plan=plan), own=NoOwnParts()))


@pytest.fixture
def shaped(tiny):
    def write(experts: int = 1):
        tiny.write_text(tiny.read_text() + SHAPE.format(experts=experts))
        return tiny

    return write


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("tp=2", "tp=2"),
        ("pp=4", "wants 4 stages, and sequential can be cut into 2; lower pp or chunks"),
    ],
)
def test_a_module_of_ones_own_is_asked_too(tmp_path, plan, message):
    """Before, only shipped models were: any plan of any other module was priced, whether or not it could run."""
    path = tmp_path / "own.toml"
    path.write_text(OWN)
    with pytest.raises(RequestError, match=message):
        price(path, plan)
    assert price(path, "dp=8").parts.stages


@pytest.mark.parametrize(
    ("plan", "message"),
    [("tp=8 pp=1", None), ("tp=16", "does not divide the 8 heads"), ("pp=8", "pp=8 ranks are more than the 4 blocks")],
)
def test_a_shape_by_numbers_is_asked_too(shaped, plan, message):
    path = shaped()
    if message is None:
        assert price(path, plan).parts.stages
        return
    with pytest.raises(RequestError, match=message):
        price(path, plan, "h100:2x8")


def test_expert_parallelism_is_simulated(shaped):
    path = shaped(experts=8)
    alone, shared = price(path, "dp=8"), price(path, "dp=8 ep=4")
    assert shared.needed.places[0].weights < alone.needed.places[0].weights
    assert shared.parts.stages[0].exposed["ep"] > 0 == alone.parts.stages[0].exposed["ep"]


@pytest.mark.parametrize(
    ("experts", "plan", "message"),
    [
        (1, "dp=8 ep=2", "ep=2 shares out experts, and .* has none; leave ep out"),
        (6, "dp=8 ep=4", "ep=4 does not divide the 6 experts"),
        (8, "dp=2 tp=4 ep=4", "ep=4 ranks are taken from the dp=2 replicas"),
    ],
)
def test_expert_parallelism_that_cannot_be(shaped, experts, plan, message):
    with pytest.raises(RequestError, match=message):
        price(shaped(experts), plan)
