"""Workers that are groups of ranks: a rank is killed or stopped, and the run ends in the bits of one that was left alone.

The death of a rank is the death of its worker, whichever rank it is: all of them are started again, and none is left behind.
"""

import os
import signal

import psutil
import pytest

from support.models.paced import allow
from support.paramserver.server_job import RECIPE, STEPS, ServerJob, check_steps, rationed
from support.paramserver.server_job import start_job as start_job
from support.processes.command import wait_until

soak = pytest.mark.soak
pytestmark = pytest.mark.timeout(400)
PLAN = "ps=1 workers=2 pp=2 microbatches=2 update=bsp"
ROW = RECIPE.replace("support.models.paced:build", "support.models.paced:build_row")
GROUPS = [["worker-0", "worker-0.1"], ["worker-1", "worker-1.1"]]
PASSES = 28
"""Of each group, in microbatches, until the test has done what it wants: 14 steps of 30, of two microbatches for each group."""


@pytest.fixture
def ration(tmp_path):
    """Where the passes of each group are that a run with this ration may make; a group that comes back has them anew."""
    path = tmp_path / "ration"
    allow(path, PASSES)
    return path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The hash of the weights that the run gives when nothing happens to it."""
    run = ServerJob(tmp_path_factory.mktemp("undisturbed"), plan=PLAN, recipe=ROW)
    try:
        summary = run.end()
        assert summary["status"] == "completed" and summary["deaths"] == 0
        check_steps(run, STEPS)
        return summary["weights_sha256"]
    finally:
        run.stop()


def expect_same(run, undisturbed, *, deaths):
    summary = run.end()
    assert (summary["status"], summary["weights_sha256"]) == ("completed", undisturbed), run.logs()
    assert summary["deaths"] == deaths
    check_steps(run, STEPS)


@soak
@pytest.mark.parametrize("name", ["worker-0.1", "worker-1"])
def test_a_killed_rank_is_its_workers_death_and_changes_no_bit(start_job, undisturbed, ration, name):
    run = start_job(plan=PLAN, recipe=rationed(ration, ROW))
    run.wait_for_step(4)
    group = next(names for names in GROUPS if name in names)
    pids = {member: run.pid(member) for member in group}
    os.kill(pids[name], signal.SIGKILL)
    # Every rank of the group is another process afterwards: none of the old ones was kept, and none is left behind.
    for member, pid in pids.items():
        run.wait_for_other(member, pid)
    allow(ration, 1000)
    expect_same(run, undisturbed, deaths=1)
    assert (
        f"{name} (process {pids[name]}) died: killed by signal 9 (SIGKILL); {group[0]} with its 2 ranks" in run.output
    )


@soak
def test_both_groups_lose_a_rank_again_and_again(start_job, undisturbed, ration):
    """A group may have to reach each step alone, at four passes a step, where the other comes back late: it then stood still in a
    work unit that nobody else could take."""
    run = start_job(plan=PLAN, recipe=rationed(ration, ROW))
    for step, passes, names in (
        (3, 4 * 3, ["worker-0.1", "worker-1"]),
        (8, 4 * (8 - 3), ["worker-1.1"]),
        (12, 4 * (12 - 3), ["worker-0", "worker-1.1"]),
    ):
        allow(ration, passes)
        run.wait_for_step(step)
        pids = {name: run.pid(name) for name in names}
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
        for name, pid in pids.items():
            run.wait_for_other(name, pid)
    allow(ration, 1000)
    expect_same(run, undisturbed, deaths=5)


@soak
def test_a_rank_that_is_stopped_is_ended_and_its_worker_started_again(start_job, undisturbed, ration):
    """Nobody but its leader, which waits for it, would notice: the center hears from the leader alone."""
    recipe = rationed(ration, ROW).replace("dead_seconds = 20.0", "dead_seconds = 3.0")
    run = start_job(plan=PLAN, recipe=recipe)
    run.wait_for_step(4)
    pid = run.kill("worker-1.1", signal.SIGSTOP)
    run.wait_for_other("worker-1.1", pid)
    allow(ration, 1000)
    expect_same(run, undisturbed, deaths=1)
    assert f"worker-1.1 (process {pid}) is silent for 3 s; it is killed" in run.output


@soak
def test_a_stopped_run_goes_on_where_it_was(start_job, undisturbed):
    """Every rank ends in order, and groups that are new go on from the checkpoint."""
    recipe = ROW.replace("seconds = 0.08", "seconds = 0.4")
    first = start_job(plan=PLAN, recipe=recipe)
    first.wait_for_step(7)
    first.process.send_signal(signal.SIGTERM)
    summary = first.end(expect=143)
    assert (summary["status"], summary["steps"]) == ("interrupted", first.step())
    expect_same(start_job("--resume", plan=PLAN, recipe=recipe, run_dir=first.run_dir), undisturbed, deaths=0)


@soak
def test_a_server_without_a_backup_takes_the_groups_back_to_the_checkpoint(start_job, undisturbed, ration):
    run = start_job(plan=PLAN, recipe=rationed(ration, ROW))
    run.wait_for_step(12)
    run.kill("server-0")
    allow(ration, 1000)
    expect_same(run, undisturbed, deaths=1)


@soak
def test_the_ranks_of_a_group_die_with_their_job(start_job, ration):
    run = start_job(plan=PLAN, recipe=rationed(ration, ROW))
    run.wait_for_step(2)
    members = run.members()
    assert {name for names in GROUPS for name in names} <= members.keys()
    run.process.kill()
    run.process.wait()
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in members.values()), "all members to be gone")
