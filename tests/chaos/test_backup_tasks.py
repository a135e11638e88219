"""The last slow work units of a batch under L-BFGS are given to a second worker: a run whose worker stands still in one of them
goes on while it stands, though it is not taken for dead, and ends in the bits of a run in which it did not.
"""

import os
import re
import signal

import pytest

from support.models.paced import allow
from support.paramserver.server_job import start_job as start_job
from support.processes.command import wait_until

pytestmark = pytest.mark.timeout(300)
STEPS = 8
RECIPE = """
[model]
build = "support.models.paced:build_rationed_digits"
args = {{ ration = "{ration}" }}
[data]
source = "digits"
[train]
steps = 8
global_batch = 2000
threads = 1
seed = 3
precision = "float64"
[checkpoint]
every = 0
[telemetry]
tensorboard = false
[paramserver]
hang_after = 0
dead_seconds = 600.0
"""
PLAN = "ps=2 workers=2 update=lbfgs"


@pytest.mark.soak
def test_a_unit_whose_worker_stands_still_is_done_by_another(start_job, tmp_path):
    ration = tmp_path / "ration"
    allow(ration, 1_000_000)
    undisturbed = start_job(plan=PLAN, recipe=RECIPE.format(ration=ration), folder=tmp_path / "undisturbed").end()
    for name in ("worker-0", "worker-1"):
        allow(ration.with_name(name), 3)
    run = start_job(plan=PLAN, recipe=RECIPE.format(ration=ration))
    # Each has a work unit of the first batch, of which there are 16; neither an answer nor a question is on the way.
    wait_until(lambda: len(list(tmp_path.glob("worker-*.waits"))) == 2, "both workers to be in a work unit", 90)
    pid = run.kill("worker-1", signal.SIGSTOP)
    try:
        allow(ration.with_name("worker-0"), 1_000_000)
        run.wait_for_step(3)
    finally:
        allow(ration.with_name("worker-1"), 1_000_000)
        os.kill(pid, signal.SIGCONT)
    summary = run.end()
    assert (summary["status"], summary["steps"], summary["deaths"]) == ("completed", STEPS, 0)
    assert summary["weights_sha256"] == undisturbed["weights_sha256"]
    twice = {event["update"]: event["num_duplicates"] for event in run.events("update")}
    assert [twice.get(update, 0) for update in range(3)] == [1, 0, 0], "what stood still is done by the other, once"
    # Nobody took it for dead: that would have freed its work unit too. Of several centers one may have led after the other.
    found = re.findall(r"epoch (\d+): 2 servers, (\d) workers", run.logs())
    views = [int(workers) for _, workers in sorted(found, key=lambda view: int(view[0]))]
    assert views == sorted(views) and views[-1] == 2, found
