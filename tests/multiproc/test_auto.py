"""``shoal calibrate``, ``shoal train --plan auto`` and ``shoal tune`` from outside, with a cache folder of their own."""

import json

import pytest

from shoal.core.config import validate
from shoal.core.plan import Plan
from shoal.planner.hardware.machine import write_machine
from shoal.trainer.config import Recipe, load_recipe
from shoal.tuning.calibration import measure_machine
from shoal.tuning.rehearsal_pool import NoRoom, RehearsalPool
from support.planner.machines import build
from support.processes.command import read_summary

# One block with one head is cut neither by tp nor by pp: four plans of dp, one of cp. All are rehearsed, however long it takes;
# those that are tried have one round.
SETTINGS = ("layers=1", "heads=1", "kv_heads=1")
BUDGETS = ("search_seconds=900", "try_seconds=0.01")
FEW = [f"--set=model.{setting}" for setting in SETTINGS] + [f"--set=planner.auto.{budget}" for budget in BUDGETS]
# What a replica says of 16 samples at once takes 128 MiB, and as much again for every function of it.
WORDY = {
    "plan": "auto",
    "model": {"name": "gpt", "layers": 1, "hidden": 16, "heads": 2},
    "data": {"source": "synthetic", "kind": "tokens", "samples": 64, "sequence": 256, "vocab": 8192},
    "train": {"steps": 3, "global_batch": 32},
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A machine file that is measured once for all tests here."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def at(cache):
    return {"XDG_CACHE_HOME": str(cache)}


def test_without_a_machine_file_auto_measures_shortly_picks_runs_and_compares(shoal, tiny, at, cache):
    chosen = ("--plan", "auto", "--nproc", "2", "--run-dir", "run", *FEW)
    done = shoal.run("train", tiny, *chosen, environment=at, timeout=110)
    machine = json.loads((cache / "shoal" / "machine.json").read_text())
    assert machine["provenance"]["cores"] >= 1 and len(machine["sha256"]) == 64
    assert "timing this machine shortly" in done.stderr and "never picked" in done.stderr
    assert "runner-up" in done.stderr and "real steps" in done.stderr and "try_seconds" in done.stderr
    summary = read_summary(shoal.folder / "run")
    told = summary["forecast"]
    assert told["plan"] == summary["plan"] and summary["world_size"] == 2
    assert told["traffic_is_equal"] and told["state_is_equal"]
    assert told["step_seconds"]["predicted"] > 0 and told["step_seconds"]["measured"] > 0
    assert len(told["ranks"]) == 2 and told["ranks"][0]["peak_bytes"]["measured"] > 0
    assert all(
        rank["peak_bytes"]["predicted"] > sum(rank["state_bytes"]["measured"].values()) for rank in told["ranks"]
    )
    assert "predicted beside measured" in done.stdout


def test_what_no_plan_fits_is_refused_before_the_machine_is_timed(shoal, tiny, tmp_path):
    at = {"XDG_CACHE_HOME": str(tmp_path)}
    done = shoal.run("train", tiny, "--plan", "auto", "--nproc", "7", environment=at, timeout=110, expect=2)
    assert "no plan for 7 processes fits" in done.stderr and "timing this machine" not in done.stderr
    assert not (tmp_path / "shoal").exists()


@pytest.mark.soak
def test_a_run_that_goes_on_keeps_its_plan(shoal, tiny, at):
    (shoal.folder / "auto.toml").write_text((shoal.folder / "tiny.toml").read_text().replace('"dp=1"', '"auto"', 1))
    chosen = ("--set", "train.steps=4", "--run-dir", "run")
    shoal.run("train", "auto.toml", "--plan", "dp=1 tp=2", *chosen, environment=at)
    done = shoal.run("train", "auto.toml", "--set", "train.steps=6", "--run-dir", "run", "--resume", environment=at)
    assert "going on with the plan of the run, dp=1 tp=2" in done.stderr
    assert read_summary(shoal.folder / "run")["plan"] == "dp=1 tp=2"


@pytest.mark.soak
def test_a_named_plan_can_be_forecast_too(shoal, tiny, at):
    done = shoal.run(
        "train", tiny, "--plan", "dp=1 pp=2", "--forecast", "--run-dir", "run", environment=at, timeout=110
    )
    told = read_summary(shoal.folder / "run")["forecast"]
    assert told["traffic_is_equal"] and told["state_is_equal"]
    assert 0 < told["bubble"]["predicted"] < 1 and 0 <= told["bubble"]["measured"] < 1
    assert "bubble" in done.stdout


@pytest.mark.soak
def test_tune_tries_the_best_plans_for_real(shoal, tiny, at):
    done = shoal.run(
        *("tune", tiny, "--nproc", "2", "--top", "3", "--steps", "4", "--json", "out.json", "--write", "tuned.toml"),
        *FEW,
        environment=at,
        timeout=110,
    )
    found = json.loads((shoal.folder / "out.json").read_text())
    assert len(found["plans"]) == 3 and found["plan"] == found["plans"][0]["plan"]
    times = [plan["measured_seconds"] for plan in found["plans"]]
    assert times == sorted(times) and all(time > 0 for time in times)
    assert found["regret"] >= 0 and f"fastest: {found['plan']}" in done.stdout
    assert load_recipe(shoal.folder / "tuned.toml").plan == found["plan"] and found["written"] == "tuned.toml"
    assert "run it:  shoal train tuned.toml --set " in done.stdout
    assert load_recipe(tiny).plan == "dp=1", "the recipe itself was not named"


@pytest.mark.soak
def test_constants_are_refitted_to_a_run(shoal, tiny, at, cache):
    shoal.run("train", tiny, "--plan", "dp=2", "--run-dir", "run", environment=at)
    shoal.run("calibrate", "--from-runs", "run", "--json", "out.json", environment=at, timeout=110)
    fit = json.loads((shoal.folder / "out.json").read_text())["fit"]
    assert fit["runs"] == ["run"] and fit["compute"] > 0
    assert json.loads((cache / "shoal" / "machine.json").read_text())["fit"] == fit


@pytest.mark.soak
def test_a_plan_without_room_is_known_for_it_and_the_next_has_its_turn():
    whole, cut = Plan.parse("dp=2"), Plan.parse("dp=2 microbatches=16")
    with RehearsalPool(validate(Recipe, WORDY, origin="test"), 2, memory_bytes=300 << 20) as pool:
        with pytest.raises(NoRoom, match="plan dp=2 does not fit"):
            pool.rehearse(whole, build(), steps=1)
        assert pool.rehearse(cut, build(), steps=1)["seconds"] > 0
        with pytest.raises(NoRoom, match="plan dp=2 does not fit"):
            pool.play(whole, steps=1)


@pytest.mark.soak
def test_an_odd_number_of_processes_is_timed():
    machine = measure_machine(counts=[3], quick=True)
    sends = [timed for timed in machine.collectives if timed.operation == "send"]
    assert sends and all(timed.processes == 3 and timed.seconds > 0 for timed in sends)


def test_what_cannot_be_fitted_to_is_refused(shoal, tmp_path):
    at = {"XDG_CACHE_HOME": str(tmp_path)}
    write_machine(tmp_path / "shoal" / "machine.json", build())
    (shoal.folder / "empty").mkdir()
    done = shoal.run("calibrate", "--from-runs", "empty", expect=2, environment=at)
    assert "not a run directory" in done.stderr


def test_an_edited_machine_file_is_refused_by_name(shoal, tiny):
    write_machine(shoal.folder / "mine.json", build())
    page = json.loads((shoal.folder / "mine.json").read_text())
    page["rank_bytes"] += 1
    (shoal.folder / "mine.json").write_text(json.dumps(page))
    done = shoal.run("tune", tiny, "--nproc", "2", "--machine", "mine.json", expect=2)
    assert "changed after it was measured" in done.stderr


def test_a_launched_rank_has_no_say(shoal, tiny):
    launched = {"RANK": "0", "WORLD_SIZE": "1"}
    done = shoal.run("train", tiny, "--plan", "auto", expect=2, environment=launched)
    assert "a launcher has started the ranks already" in done.stderr
