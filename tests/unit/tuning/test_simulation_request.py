"""What a simulation refuses before anything is priced, and what it derives."""

import subprocess
import sys

import pytest

from shoal.core.errors import RequestError
from shoal.data.check import DataSummary
from shoal.tuning.simulation_request import Asked, SimulationRequest, read_simulation

GIVEN = {"overrides": ("train.global_batch = 8",)}
"""The recipe's own batch, asked for."""


class NoOwnParts:
    """The recipes here name shipped parts only."""

    def measure_data(self, recipe) -> DataSummary:
        raise AssertionError

    def check_plan(self, recipe, plan) -> None:
        raise AssertionError


def ask(tiny, cluster: str, plan: str | None = None, **options) -> Asked:
    return read_simulation(SimulationRequest(recipe=tiny, cluster=cluster, plan=plan, **options), own=NoOwnParts())


def test_dp_takes_up_the_devices(tiny):
    asked = ask(tiny, "h100:2x8", "tp=2 pp=2", overrides=("train.global_batch=16",))
    assert str(asked.plan) == "dp=4 tp=2 pp=2 schedule=1f1b microbatches=4"
    assert asked.cluster.num_devices == 16 and asked.warnings == () and asked.site_plan == asked.plan


def test_the_recipes_plan_takes_all_devices_when_none_is_given(tiny):
    assert ask(tiny, "h100:8").plan.dp == 8


def test_a_plan_may_be_smaller_than_the_cluster_and_is_said_to_be(tiny):
    asked = ask(tiny, "h100:2x8", "dp=4")
    assert asked.cluster.num_devices == 4
    assert asked.warnings == ("the plan uses 4 of the cluster's 16 devices",)


def test_devices_in_place_of_the_clusters(tiny):
    """More replicas than the data could feed: nothing is read, so nothing runs out."""
    asked = ask(tiny, "h100:2x8", "tp=2", num_devices=10_000, overrides=("train.global_batch=5000",))
    assert asked.plan.dp == 5000 and asked.cluster.num_devices == 10_000


def test_sites_share_the_replicas(tiny):
    asked = ask(tiny, "a100:2x8", "dp=8 tp=2 zero=1", is_local=True, num_sites=4)
    assert (asked.num_sites, str(asked.site_plan)) == (4, "dp=2 tp=2 zero=1")
    assert asked.site_cluster.num_devices == 4
    alone = ask(tiny, "a100:2x8", "dp=8 tp=2 zero=1", is_local=True)
    assert (alone.num_sites, str(alone.site_plan)) == (8, "dp=1 tp=2")
    assert alone.warnings == ("zero=1 has nothing to shard in a site with one replica, and is left out",)


@pytest.mark.parametrize(
    ("plan", "num_devices", "overrides", "batch", "over"),
    [
        ("dp=10000", 10_000, (), 10_000, "10000 replica(s)"),
        ("dp=3", 3, (), 9, "3 replica(s)"),
        ("dp=2 microbatches=3", 2, (), 12, "2 replica(s) x 3 microbatch(es)"),
        ("dp=2 microbatches=16", 2, (), 32, "2 replica(s) x 16 microbatch(es)"),
        ("dp=3", 3, ("train.micro_batch=2",), 12, "3 replica(s) x 2 sample(s) each"),
        # Both numbers are said: their product is a replica's share, also where that is less than the recipe's batch.
        ("dp=1 microbatches=3", 1, ("train.micro_batch=1",), 3, "1 replica(s) x 3 microbatch(es) x 1 sample(s) each"),
        # Two microbatches for each pipeline rank, as a run takes when nobody says, or the next number that a schedule takes.
        ("tp=2 pp=2", 10_000, (), 10_000, "2500 replica(s)"),
        ("pp=4 schedule=zb-h1", 10_000, ("model.layers=4",), 20_000, "2500 replica(s)"),
        ("pp=2 schedule=dualpipev", 6, (), 12, "3 replica(s)"),
        ("pp=2", 6, ("train.micro_batch=5",), 60, "3 replica(s) x 5 sample(s) each"),
    ],
)
def test_a_batch_that_nobody_asks_for_is_made_to_fit(tiny, plan, num_devices, overrides, batch, over):
    asked = ask(tiny, "h100:1x8", plan, num_devices=num_devices, overrides=overrides)
    assert asked.global_batch == asked.recipe.train.global_batch == batch
    assert asked.micro_batch * (asked.plan.microbatches or 1) * asked.plan.dp == batch
    assert asked.derived == (
        f"the recipe's global batch of 8 cannot be shared out over {over}: {batch} is simulated; --global-batch says another"
    )


@pytest.mark.parametrize(("plan", "num_devices"), [("dp=8", 8), ("dp=2 pp=2", 4), ("dp=2 microbatches=4", 2)])
def test_a_batch_that_fits_is_the_recipes(tiny, plan, num_devices):
    asked = ask(tiny, "h100:1x8", plan, num_devices=num_devices)
    assert asked.global_batch == 8 and asked.derived is None


@pytest.mark.parametrize(
    ("cluster", "plan", "options", "message"),
    [
        ("a10:4x8", None, {}, "there is no device 'a10'; did you mean 'a100'"),
        ("a100", None, {}, "is not NAME:NODESxDEVICES"),
        ("a100:4x8", "dp=8 tp=4 pp=2", {}, "needs 64 devices, and the cluster has 32; give a cluster of 64"),
        ("a100:4x8", "tp=3", {}, r"32 devices are not a multiple of the 3 .* use --devices 30 or 33"),
        ("a100:1x2", "tp=4", {}, r"2 devices are not a multiple of the 4 .* use --devices 4, or"),
        ("a100:4x8", "tp=32", {}, "tp=32 does not divide the 4 heads"),
        (
            "a100:1x3",
            None,
            GIVEN,
            "batch of 8 cannot .* over its 3 replicas; give --global-batch 6 or 9, or dp=2 on --devices 2",
        ),
        ("a100:1x8", None, GIVEN | {"num_devices": 10000}, "give --global-batch 10000, or dp=8 on --devices 8$"),
        (
            "a100:1x8",
            "tp=2 pp=2",
            GIVEN | {"num_devices": 10000},
            "8 .* 2500 replicas; .* 2500, or dp=8 on --devices 32$",
        ),
        ("a100:1x8", "dp=2 microbatches=3", GIVEN, "microbatches=3 does not divide the 4 samples .*; set it to 2"),
        (
            "a100:1x8",
            "microbatches=200",
            {"num_devices": 10000},
            "10000 replicas need a global batch of 2000000 .* 1000000 is the most; give fewer microbatches, .* --devices",
        ),
        ("a100:1x8", None, {"num_devices": 0}, "--devices is 0; give 1 or more"),
        ("a100:1x8", "ps=2 workers=2", {}, r"parameter servers \(ps=2\) are not simulated"),
        ("a100:1x8", "dp=8", {"num_sites": 2}, "give --local-steps too"),
        ("a100:1x8", "dp=8", {"num_sites": 3, "is_local": True}, "--sites 3 does not divide the 8 replicas"),
        ("a100:1x8", "dp=1", {"is_local": True}, "needs two sites to average; raise dp"),
        ("a100:1x8", "dp=8 sqhedule=1f1b", {}, "did you mean 'schedule'"),
    ],
)
def test_what_cannot_be_is_refused_with_both_numbers_and_the_fix(tiny, cluster, plan, options, message):
    with pytest.raises(RequestError, match=message):
        ask(tiny, cluster, plan, **options)


def test_a_request_is_checked_without_torch():
    line = "import sys, shoal.tuning.simulation_request, shoal.planner.simulation.step"
    line += ", shoal.planner.simulation.trace, shoal.planner.simulation.run_directory"
    line += "; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", line], timeout=60, check=False).returncode == 0


def test_a_plan_that_names_only_ep_takes_up_the_devices(tiny):
    """What was left of it read as dp=1, and was refused for devices that it had not named."""
    shape = "planner.shape={layers=8, hidden=64, heads=4, vocab=64, sequence=32, experts=8, chosen_experts=2}"
    asked = ask(tiny, "h100:4x8", "ep=8", overrides=("train.global_batch=256", shape))
    assert (asked.plan.dp, asked.plan.ep) == (32, 8)
