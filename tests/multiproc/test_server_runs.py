"""``shoal train`` with parameter servers beside plans without: the same bits where that is promised, and the shipped recipes."""

import json

import pytest

from shoal.core.rundir import RunDir
from shoal.telemetry.eventlog import decode_events
from support.processes.command import ROOT, read_summary

RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("ps_*.toml"))


def train(shoal, recipe, plan, run_dir):
    """Train to the end; the hash of the weights."""
    shoal.run("train", recipe, "--plan", plan, "--run-dir", run_dir, timeout=200)
    return read_summary(shoal.folder / run_dir)["weights_sha256"]


@pytest.mark.timeout(300)
def test_async_with_one_worker_is_plain_training_bit_for_bit(shoal, tiny):
    alone = train(shoal, tiny, "dp=1", "alone")
    assert train(shoal, tiny, "ps=2 workers=1 update=async", "served") == alone
    run = RunDir(shoal.folder / "served")
    files = run.events(0).parent.glob("*.jsonl")
    found = [event for path in files for event in decode_events(path.read_bytes().splitlines())]
    views = [event for event in found if event["kind"] == "view"]
    assert (
        views
        and set(views[-1]["members"]) == {"server-0", "server-1", "worker-0"}
        and views[0]["cause"] == "the first view"
    )
    assert {event["name"] for event in found if event["kind"] == "placed"} >= {"server-0", "worker-0", "center-0"}
    live = json.loads(run.live.read_text())
    assert live["status"] == "ended" and {one["name"] for one in live["ranks"]} >= {"server-0", "server-1", "worker-0"}
    assert max(one["step"] for one in live["ranks"]) == read_summary(run.root)["steps"]


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_ssp_without_staleness_is_data_parallel_bit_for_bit(shoal, tiny):
    """And so it is bsp, of which ``test_roles.py`` shows the same."""
    replicas = train(shoal, tiny, "dp=2", "replicas")
    assert train(shoal, tiny, "ps=2 workers=2 update=ssp:0", "ssp") == replicas


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_class_of_torch_moves_from_servers_to_replicas_bit_for_bit(shoal, tiny):
    """Saved by the servers, gone on with by replicas: the end of the replicas that were left alone."""
    nadam = [
        "--set",
        "optim.name=torch.optim.NAdam",
        "--set",
        "optim.args={momentum_decay=0.01}",
        "--set",
        "train.steps=6",
    ]
    shoal.run("train", tiny, "--plan", "dp=2", "--run-dir", "alone", *nadam, timeout=200)
    served = ["--plan", "ps=2 workers=2 update=bsp backup=1", "--run-dir", "moved", *nadam[:-1], "train.steps=3"]
    shoal.run("train", tiny, *served, timeout=200)
    shoal.run("train", tiny, "--plan", "dp=2", "--run-dir", "moved", "--resume", *nadam, timeout=200)
    ends = [read_summary(shoal.folder / name)["weights_sha256"] for name in ("alone", "moved")]
    assert ends[0] == ends[1]


GROUPED = {
    "adasum": ("bsp", ["paramserver.aggregate=adasum"]),
    "local steps": ("bsp", ["paramserver.aggregate=fednova", "paramserver.local_steps=2"]),
    "lbfgs": ("lbfgs", ["optim.weight_decay=0"]),
}
"""What verify has no counterpart for."""


@pytest.mark.timeout(300)
@pytest.mark.soak
@pytest.mark.parametrize("name", GROUPED)
def test_a_worker_that_is_a_group_gives_the_bits_of_one_process(shoal, tiny, name):
    update, settings = GROUPED[name]
    found = set()
    for group in ("", "pp=2 "):
        plan, run_dir = f"ps=2 workers=2 {group}microbatches=2 update={update}", f"run-{group.strip()}"
        words = [word for setting in [*settings, "train.steps=4"] for word in ("--set", setting)]
        shoal.run("train", tiny, "--plan", plan, "--run-dir", run_dir, *words, timeout=200)
        found.add(read_summary(shoal.folder / run_dir)["weights_sha256"])
    assert len(found) == 1


# Every recipe learns in the soak; here one is looked at.
@pytest.mark.parametrize("name", [RECIPES[0], *(pytest.param(name, marks=pytest.mark.soak) for name in RECIPES[1:])])
def test_a_shipped_recipe_with_servers_is_laid_out(shoal, name):
    done = shoal.run("train", ROOT / "recipes" / f"{name}.toml", "--dry-run", "--run-dir", "run")
    assert "servers" in done.stdout and "workers" in done.stdout


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", RECIPES)
def test_a_shipped_recipe_with_servers_learns(shoal, name):
    shoal.run("train", ROOT / "recipes" / f"{name}.toml", "--run-dir", "run", timeout=500)
    summary = read_summary(shoal.folder / "run")
    assert summary["status"] == "completed" and summary["deaths"] == 0
    assert summary["final_loss"] < summary["first_loss"] and summary["validation_loss"] < summary["first_loss"]
