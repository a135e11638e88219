"""Cables between real machines (network namespaces) in a run that goes on: pulled out for a moment, or for good.

The coordinator's own lines do not go over these cables, as on a cluster that has a network for management.
"""

import json
import os
import sys
from pathlib import Path

import pytest

from shoal.telemetry.summaryfile import read_summary
from support.processes.command import ROOT, TINY, wait_for_step
from support.processes.machines import built_machines

pytestmark = [pytest.mark.soak, pytest.mark.timeout(400)]
ADDRESSES = {"m1": "10.84.0.1", "m2": "10.84.0.2", "m3": "10.84.0.3"}
DEATHS = 'callbacks = ["support.elastic.deaths:Deaths"]\n'


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    with built_machines(tmp_path_factory.mktemp("machines"), ADDRESSES) as made:
        yield made


def start(shoal, machines, plan, *, hosts, steps, **settings):
    recipe = shoal.folder / "recipe.toml"
    # Each step takes a while, so that a cable is pulled in the middle of the run.
    recipe.write_text(DEATHS + TINY.replace("every = 3", "every = 0"))
    changes = {"train.steps": steps, "elastic.mode": "shrink", "elastic.lease_seconds": 5, **settings}
    words = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    named = ",".join(f"{host}:1" for host in hosts)
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    slow = ";".join(f"rank {rank}@0:microbatch:burn" for rank in range(3))
    return shoal.start(
        "train", recipe, "--plan", plan, "--run-dir", "run", "--hosts", named,
        "--ssh", machines.shell_to(shoal.folder), "--python", sys.executable, *words,
        environment={"PYTHONPATH": path, "DEATHS": slow},
    )  # fmt: skip


def ending(shoal, process, plan, steps):
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    lines = (shoal.folder / "run" / "events" / "supervisor.jsonl").read_text().splitlines()
    path = {"PYTHONPATH": str(ROOT / "tests")}
    calm = ("--plan", plan, "--run-dir", "calm", "--set", f"train.steps={steps}")
    shoal.run("train", Path("recipe.toml"), *calm, environment=path)
    summary = read_summary(shoal.folder / "run")
    assert summary["weights_sha256"] == read_summary(shoal.folder / "calm")["weights_sha256"], stderr
    return [event for event in map(json.loads, lines) if event["kind"] == "view"], stderr, summary


def test_a_cable_that_is_out_for_two_seconds_costs_these_and_nothing_else(shoal, machines):
    process = start(shoal, machines, "dp=2", hosts=("m1", "m2"), steps=60)
    wait_for_step(shoal.folder / "run", 10)
    machines.network.set_link("m2", "down")
    try:
        with pytest.raises(Exception, match="timed out"):
            process.communicate(timeout=2)
    finally:
        machines.network.set_link("m2", "up")
    views, stderr, _ = ending(shoal, process, "dp=2", 60)
    assert [view["replicas"] for view in views] == [2], stderr


def test_a_host_whose_cable_stays_out_is_blamed_and_left_out(shoal, machines):
    settings = {"elastic.collective_deadline": 15, "elastic.max_failures": 0}
    process = start(shoal, machines, "dp=3", hosts=ADDRESSES, steps=60, **{"train.global_batch": 6, **settings})
    wait_for_step(shoal.folder / "run", 10)
    machines.network.set_link("m2", "down")
    try:
        _, stderr = process.communicate(timeout=200)
    finally:
        machines.network.set_link("m2", "up")
    assert process.returncode == 0, stderr
    lines = (shoal.folder / "run" / "events" / "supervisor.jsonl").read_text().splitlines()
    views = [event for event in map(json.loads, lines) if event["kind"] == "view"]
    assert views[-1]["hosts"] == ["m1", "m3"] and "host m2 was not reached" in stderr, stderr
    steps = read_summary(shoal.folder / "run")
    calm = ("--plan", "dp=3", "--run-dir", "calm", "--set", "train.steps=60", "--set", "train.global_batch=6")
    shoal.run("train", Path("recipe.toml"), *calm, environment={"PYTHONPATH": str(ROOT / "tests")})
    assert steps["weights_sha256"] == read_summary(shoal.folder / "calm")["weights_sha256"], stderr
