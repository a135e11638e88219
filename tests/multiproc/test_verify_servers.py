"""``shoal verify`` for plans with parameter servers: real servers, workers and centers beside one process."""

import json

import pytest

from shoal.core.plan import Plan
from shoal.trainer.config import load_recipe
from shoal.verify.mutants.catalogue import MUTANTS
from shoal.verify.mutants.mutant import Death
from shoal.verify.proof import Prover
from shoal.verify.request import build_subject
from shoal.verify.session import try_mutant
from support.processes.command import ROOT, TINY

PLANS = (
    "ps=2 workers=2 update=bsp backup=1",
    "ps=1 workers=2 update=async",
    "pp=2 schedule=1f1b microbatches=2 ps=1 workers=2 update=bsp",
)
SOAKED = (
    "ps=2 workers=2 update=ssp:1",
    "ps=1 workers=1 update=async",
    "ps=2 workers=1 update=ssp:2",
    "ps=2 workers=2 update=ssp:0",
    "ps=1 workers=3 update=ssp:3",
    "ps=2 workers=3 update=bsp microbatches=2",
    "ps=2 workers=3 update=async backup=1",
    "ps=1 workers=3 update=half:2,0.25",
    "ps=2 workers=3 update=half:2,0",
    "ps=2 workers=2 update=downpour:2,2",
    "ps=1 workers=3 update=downpour:3,2",
    "ps=2 workers=2 pp=2 schedule=chimera microbatches=2 update=ssp:1",
    "ps=1 workers=2 pp=2 schedule=zb-h1 microbatches=2 update=async",
    "ps=1 workers=2 pp=2 microbatches=2 update=half:2,0.25",
    "ps=1 workers=2 pp=2 schedule=interleaved microbatches=2 update=downpour:2,2 recompute=full",
)
SPLIT = (
    "ps=1 workers=2 tp=2 update=bsp",
    "ps=2 workers=1 tp=2 sp=true cp=2 update=bsp",
    "ps=1 workers=2 cp=2 cp_kind=alltoall update=ssp:1",
    "ps=1 workers=2 tp=2 pp=2 microbatches=2 update=async",
)
"""Workers whose ranks split single sums: within the law's tolerance."""
SERVER_MUTANTS = [name for name, mutant in MUTANTS.items() if mutant.plan.startswith("ps=")]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "tiny.toml"
    # Twelve samples, which three workers can share too, and a rate that falls with every update.
    path.write_text(
        TINY.replace("global_batch = 8", "global_batch = 12").replace("lr = 1e-3", 'lr = 1e-3\nschedule = "linear"')
    )
    return path


@pytest.mark.soak
@pytest.mark.timeout(240)
@pytest.mark.parametrize("update", ["async", pytest.param("ssp:2", marks=pytest.mark.soak)])
def test_weights_that_are_pulled_while_a_worker_computes_are_those_that_it_says(shoal, recipe, tmp_path, update):
    written, plan = tmp_path / "certificate.json", f"ps=2 workers=2 update={update}"
    shoal.run(
        "verify", recipe, "--plan", plan, "--set", "paramserver.overlap=true", "--json", written, timeout=200
    )  # fmt: skip
    [found] = json.loads(written.read_text())["plans"]
    assert found["ok"] and found["bitwise"]


@pytest.mark.soak
@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", ["NAdam", "RAdam", "RMSprop"])
def test_a_class_of_torch_is_proved_on_servers_and_replicas(shoal, recipe, tmp_path, kind):
    written, named = tmp_path / "certificate.json", f"optim.name=torch.optim.{kind}"
    plans = ["--plan", "ps=2 workers=2 update=bsp", "--plan", "dp=2 zero=2"]
    shoal.run("verify", recipe, *plans, "--set", named, "--json", written, timeout=200)
    assert all(found["ok"] and found["bitwise"] for found in json.loads(written.read_text())["plans"])


@pytest.mark.soak
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("update", "setting"), [("async", "overlap=true"), ("bsp", "hot=measured"), ("ssp:2", "cache_staleness=2")]
)
def test_settings_are_proved_with_groups(shoal, recipe, tmp_path, update, setting):
    written, plan = tmp_path / "certificate.json", f"ps=2 workers=2 pp=2 microbatches=2 update={update}"
    shoal.run(
        "verify", recipe, "--plan", plan, "--set", f"paramserver.{setting}", "--json", written, timeout=200
    )  # fmt: skip
    [found] = json.loads(written.read_text())["plans"]
    assert found["ok"] and found["bitwise"]


@pytest.mark.timeout(240)
def test_servers_are_proved_bit_for_bit(shoal, recipe, tmp_path):
    """Every replica of every shard, after every update; and the log kept its rule."""
    written = tmp_path / "certificate.json"
    plans = [word for plan in PLANS for word in ("--plan", plan)]
    done = shoal.run("verify", recipe, *plans, "--json", written, timeout=230)
    found = json.loads(written.read_text())["plans"]
    assert sorted(plan["plan"] for plan in found) == sorted(PLANS)
    for plan in found:
        assert plan["ok"] and plan["bitwise"] and plan["steps"] == 3, plan
        assert all(plan["worst"][kind] == 0.0 for kind in ("grad", "norm", "weight", "optimizer"))
        assert plan["worst"]["loss"] < 1e-6 and plan["first_difference"] is None
    reasons = {plan["plan"]: plan["reason"] for plan in found}
    assert "a log of 6 updates" in reasons[PLANS[1]]
    assert "3 of 3 equal one process, 3 of them bit for bit" in done.stdout


@pytest.mark.timeout(120)
def test_a_planted_bug_is_caught_in_the_servers(recipe):
    subject = build_subject(load_recipe(recipe))
    with Prover(steps=2) as prover:
        found = prover.prove(subject, Plan.parse("ps=1 workers=2"), "float32", mutant="a worker's share dropped")
    assert not found.ok and found.first_difference.kind == "grad" and found.first_difference.step == 1


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_server_that_dies_changes_no_bit(recipe):
    subject = build_subject(load_recipe(recipe))
    plan = Plan.parse("ps=2 workers=2 update=bsp backup=1")
    with Prover(steps=4) as prover:
        found = prover.prove(subject, plan, "float32", deaths=[Death("server-0", 1)])
        assert found.ok and found.bitwise, found
        # A death that nobody asked for is a failed proof.
        broken = prover.prove(subject, plan, "float32", mutant="no such mutant")
    assert broken.status == "crashed" and "no such mutant" in broken.reason


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("plan", SOAKED)
def test_more_plans_are_proved(recipe, plan):
    subject = build_subject(load_recipe(recipe))
    with Prover(steps=4) as prover:
        for precision in ("float32", "float64", "bfloat16"):
            found = prover.prove(subject, Plan.parse(plan), precision)
            assert found.ok and found.bitwise, found


@pytest.mark.timeout(240)
@pytest.mark.soak
@pytest.mark.parametrize("plan", SPLIT)
def test_workers_that_split_sums_are_proved_within_the_law(recipe, plan):
    subject = build_subject(load_recipe(recipe))
    with Prover(steps=3) as prover:
        for precision, bound in (("float64", 1e-12), ("float32", 1e-5)):
            found = prover.prove(subject, Plan.parse(plan), precision)
            assert found.ok and found.steps == 3, found
            assert 0 < found.worst["grad"] <= bound, found.worst


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SERVER_MUTANTS)
def test_every_planted_bug_of_servers_is_caught(name):
    own = load_recipe(ROOT / "recipes" / "tiny.toml")
    with Prover(steps=3) as prover:
        found = try_mutant(prover, MUTANTS[name], own, {})
    assert found.caught and found.control_ok, found
