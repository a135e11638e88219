"""Processes of a run with parameter servers are killed and stopped: it completes, with the weights of an undisturbed one.

Under bsp the result does not depend on who computed what, so it is compared bit for bit.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from support.models.paced import allow
from support.paramserver.server_job import PLAN, RECIPE, STEPS, ServerJob, _python_path, check_steps, rationed
from support.paramserver.server_job import start_job as start_job
from support.processes.command import read_summary, wait_until

soak = pytest.mark.soak
pytestmark = pytest.mark.timeout(400)
PASSES = 22
"""Of each worker until the test has done what it wants: of the 60 passes of the run two workers then make 44."""


@pytest.fixture
def ration(tmp_path):
    """Where the passes of each worker are that a run with this ration may make."""
    path = tmp_path / "ration"
    allow(path, PASSES)
    return path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The hash of the weights that the run gives when nothing happens to it."""
    run = ServerJob(tmp_path_factory.mktemp("undisturbed"))
    try:
        summary = run.end()
        assert summary["status"] == "completed" and summary["deaths"] == 0
        check_steps(run, STEPS)
        return summary["weights_sha256"]
    finally:
        run.stop()


def named(run, name):
    """``leading`` and ``waiting`` are the centers by what they do at the moment."""
    if name in ("leading", "waiting"):
        leading = run.center()
        return leading if name == "leading" else next(other for other in run.ranks("center") if other != leading)
    return name


def expect_same(run, undisturbed, *, deaths=0):
    summary = run.end()
    assert (summary["status"], summary["weights_sha256"]) == ("completed", undisturbed), run.logs()
    assert summary["deaths"] >= deaths
    check_steps(run, STEPS)


VICTIMS = [
    ["leading", "server-0", "worker-1"],
    pytest.param(["server-0"], marks=soak),
    pytest.param(["leading", "worker-1"], marks=soak),
    pytest.param(["worker-0"], marks=soak),
    pytest.param(["server-1"], marks=soak),
    pytest.param(["leading"], marks=soak),
    pytest.param(["waiting"], marks=soak),
    pytest.param(["center-0", "center-1"], marks=soak),
    pytest.param(["worker-0", "worker-1"], marks=soak),
    pytest.param(["worker-0", "server-0"], marks=soak),
    pytest.param(["leading", "server-0"], marks=soak),
    pytest.param(["leading", "server-1", "worker-0"], marks=soak),
]


@pytest.mark.parametrize("names", VICTIMS, ids=" ".join)
def test_killed_members_change_no_bit(start_job, undisturbed, ration, names):
    run = start_job(recipe=rationed(ration))
    run.wait_for_step(4)
    pids = [run.pid(named(run, name)) for name in names]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    allow(ration, 1000)
    expect_same(run, undisturbed, deaths=len(names))


@soak
@pytest.mark.parametrize("name", ["server-0", "server-1", "worker-0"])
def test_the_one_that_came_back_is_killed_again(start_job, undisturbed, ration, name):
    # A worker that comes back has a ration of its own: three of them and the other one make 48 passes of 60.
    allow(ration, 12)
    run = start_job(recipe=rationed(ration))
    run.wait_for_step(2)
    for step in (5, 10):
        pid = run.kill(name)
        run.wait_for_other(name, pid)
        run.wait_for_step(step)
    run.kill(name)
    allow(ration, 1000)
    expect_same(run, undisturbed, deaths=3)


@soak
def test_servers_in_turn_each_when_the_other_is_a_backup_again(start_job, undisturbed):
    # Long enough for three deaths. A ration would have to know how many passes a return to a checkpoint takes again.
    run = start_job(recipe=RECIPE.replace("seconds = 0.08", "seconds = 0.5"))
    run.wait_for_step(2)
    for name in ("server-0", "server-1", "server-0"):
        pid = run.kill(name)
        run.wait_for_other(name, pid)
        # Until every shard has two synced replicas: the center says so by the number of servers, the backup by its silence.
        seen = run.step()
        run.wait_for_step(min(seen + 4, STEPS))
    expect_same(run, undisturbed, deaths=3)


def test_everything_is_killed_and_resumed(start_job, undisturbed, ration):
    first = start_job(recipe=rationed(ration))
    first.wait_for_step(12)
    wait_for_checkpoint(first)
    members = first.members()
    assert len(members) == 6
    folder = _folder_of(members)
    first.process.kill()
    first.process.wait()
    # Nothing outlives the command, and it could not clean up: its folder in memory is left for the next start, of whatever job.
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in members.values()), "all members to be gone")
    draft = first.run_dir / "checkpoints" / ".tmp-step-00000007-0123456789abcdef"
    draft.mkdir()
    allow(ration, 1000)
    second = start_job("--resume", recipe=rationed(ration), run_dir=first.run_dir)
    wait_until(lambda: not draft.exists(), "what a dead save left to be swept before anything is saved", 60)
    expect_same(second, undisturbed, deaths=0)
    assert not folder.exists(), "the folder of a dead job was not swept"
    # It did not begin again from nothing.
    assert min(event["step"] for event in second.events("run_started") if event["step"]) >= 5


def wait_for_checkpoint(run):
    """They are written while training goes on, so a step that is done does not say that one is there."""
    wait_until(lambda: list((run.run_dir / "checkpoints").glob("step-*")), "a checkpoint", 60)


def _folder_of(members):
    """Where the sockets of these processes are; other jobs may be at work on the machine."""
    sockets = [link.laddr for pid in members.values() for link in psutil.Process(pid).net_connections("unix")]
    (folder,) = {Path(path).parent for path in sockets if path.startswith("/dev/shm/shoal-job-")}
    return folder


@soak
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_run_goes_on_where_it_was(start_job, undisturbed, number, code):
    # Long enough that the signal comes before the end; who has no ration would not hear of the stop.
    recipe = RECIPE.replace("seconds = 0.08", "seconds = 0.5")
    first = start_job(recipe=recipe)
    first.wait_for_step(7)
    first.process.send_signal(number)
    summary = first.end(expect=code)
    assert (summary["status"], summary["stopped_by"]) == ("interrupted", signal.Signals(number).name)
    # Of everything that was done nothing is lost: a checkpoint is written at the stop.
    assert summary["steps"] == first.step() >= 7
    assert (first.run_dir / "checkpoints" / f"step-{summary['steps']:08d}").exists()
    second = start_job("--resume", recipe=recipe, run_dir=first.run_dir)
    expect_same(second, undisturbed, deaths=0)
    assert second.output.count(f"going on from step {summary['steps']}, ") == 1


@soak
def test_a_stop_while_a_server_and_the_center_die(start_job, undisturbed):
    recipe = RECIPE.replace("seconds = 0.08", "seconds = 0.5")
    first = start_job(recipe=recipe)
    first.wait_for_step(7)
    pids = [first.pid("server-0"), first.pid(first.center())]
    first.process.send_signal(signal.SIGTERM)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert first.end(expect=143)["status"] == "interrupted"
    second = start_job("--resume", recipe=recipe, run_dir=first.run_dir)
    expect_same(second, undisturbed, deaths=0)


PAUSED = [
    "server-0",
    pytest.param("server-1", marks=soak),
    pytest.param("worker-0", marks=soak),
    pytest.param("leading", marks=soak),
]


@pytest.mark.parametrize("name", PAUSED)
def test_a_member_that_is_paused_is_replaced_and_refused_when_it_wakes(start_job, undisturbed, ration, name):
    """Each worker may make 8 passes before the pause, 22 until the paused one was refused: the run cannot end before that."""
    allow(ration, 8)
    run = start_job(recipe=rationed(ration, seconds=0.02).replace("dead_seconds = 20.0", "dead_seconds = 3.0"))
    run.wait_for_step(4)
    chosen = named(run, name)
    rank = run.ranks(chosen.partition("-")[0])[chosen]
    pid = run.kill(chosen, signal.SIGSTOP)
    try:
        seen = run.step()
        allow(ration, PASSES)
        # The run goes on without it.
        run.wait_for_step(seen + 3, seconds=60)
        if chosen.startswith("center"):
            # Steps need no center, so they do not show that there is another one.
            wait_until(lambda: run.center() != chosen, "another center")
    finally:
        os.kill(pid, signal.SIGCONT)
    refusal, is_death = REFUSALS[chosen.partition("-")[0]]
    run.wait_for_log(rank, refusal)
    if is_death:
        wait_until(
            lambda: f"{chosen} (process {pid}) died: exit code 1; it is started again" in run.output, "its death"
        )
        run.wait_for_other(chosen, pid)
    allow(ration, 1000)
    expect_same(run, undisturbed)
    assert read_summary(run.run_dir)["deaths"] == is_death


REFUSALS = {"server": ("Evicted: ", True), "worker": ("taken for dead: ", False), "center": ("deposed", False)}
"""What the log of a paused member says when it wakes, and whether it ends with that: a worker comes back under a new name, and a
center stands for election again."""


@soak
@pytest.mark.parametrize("name", ["server-0", "server-1"])
def test_without_a_backup_everyone_goes_back_to_the_checkpoint(start_job, undisturbed, ration, name):
    run = start_job(plan=PLAN.replace("backup=1", "backup=0"), recipe=rationed(ration))
    run.wait_for_step(12)
    wait_for_checkpoint(run)
    # As a save leaves it whose first server died in it, which hitting the right moment would do too.
    (run.run_dir / "checkpoints" / ".tmp-step-00000007-0123456789abcdef").mkdir()
    run.kill(name)
    allow(ration, 1000)
    expect_same(run, undisturbed, deaths=1)
    assert "is started again, and everybody goes back to the newest checkpoint" in run.output
    expect_return(run, [name])


def expect_return(run, died):
    """The screen says once, and an event of every server that took part, who died and to where everyone went back; the step."""
    told = run.events("went_back")
    (step,) = {event["step"] for event in told}
    assert told and all(sorted(event["died"]) == died and event["history"] == 1 for event in told), told
    line = r"(.*) died, and no copy of a shard was left: everyone went back to the checkpoint of step (\d+)\n"
    ((names, where),) = re.findall(line, run.output)
    assert sorted(names.split(" and ")) == died and int(where) == step
    assert "went back        1 time to a checkpoint" in run.output and read_summary(run.run_dir)["went_back"] == 1
    return step


def test_the_death_of_both_copies_of_a_shard_takes_everyone_back_and_says_so(start_job, undisturbed, tmp_path, ration):
    allow(ration, 14)
    run = start_job(recipe=rationed(ration, seconds=0.02))
    # 14 to 28 passes are 7 to 14 steps: there is a checkpoint, and it stays the newest while everybody waits.
    run.wait_for_step(7)
    wait_until(lambda: list(tmp_path.glob("worker-*.waits")), "a worker without a ration")
    due = run.run_dir / "checkpoints" / f"step-{run.step() // 5 * 5:08d}"
    wait_until(due.exists, "the checkpoint that is due")
    pids = [run.pid(name) for name in ("server-0", "server-1")]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: run.events("went_back"), "everyone to go back", 60)
    allow(ration, 1000)
    expect_same(run, undisturbed, deaths=2)
    assert f"step-{expect_return(run, ['server-0', 'server-1']):08d}" >= due.name


@soak
def test_a_worker_that_hangs_in_its_compute_says_where_and_is_replaced(start_job, undisturbed, tmp_path):
    """Its heart beats and it answers the center, so nobody else can know; under bsp everyone would wait for it for ever."""
    recipe = RECIPE.replace("support.models.paced:build", "support.models.paced:build_hanging_once").replace(
        "args = { seconds = 0.08 }", f'args = {{ seconds = 0.08, mark = "{tmp_path}/mark" }}'
    )
    run = start_job(recipe=recipe + "hang_after = 5\nhang_seconds = 5.0\n")
    expect_same(run, undisturbed, deaths=1)
    summary, (hung,) = read_summary(run.run_dir), run.events("hung")
    assert (summary["deaths"], summary["hung"], hung["worker"]) == (1, 1, "worker-1")
    assert hung["seconds"] > max(5.0, 5 * hung["usual_seconds"])
    assert run.output.count(f"worker-1 hangs in step {hung['step']}: ") == 1
    assert "hung             1 worker," in run.output
    assert "in never_return" in _log(run, run.ranks("worker")["worker-1"])


def test_a_gradient_that_is_not_finite_is_refused_counted_and_told(start_job, undisturbed, tmp_path):
    """Once, of one worker: it is told and ends, another does what it was doing, and no weight has met it."""
    recipe = RECIPE.replace("support.models.paced:build", "support.models.paced:build_poisoned_once").replace(
        "args = { seconds = 0.08 }", f'args = {{ seconds = 0.08, mark = "{tmp_path}/mark" }}'
    )
    run = start_job(recipe=recipe)
    expect_same(run, undisturbed, deaths=1)
    summary, told = read_summary(run.run_dir), run.events("gradient_refused")
    assert (summary["not_finite"], summary["deaths"]) == (1, 1)
    assert {event["worker"] for event in told} == {"worker-1"} and len({event["push"] for event in told}) == 1
    assert all("NaN or infinity in the gradient of '" in event["reason"] for event in told)
    assert run.output.count("a gradient of worker-1 is refused, and no weight was touched: ") == 1
    assert "refused          1 gradient with NaN or infinity" in run.output
    assert "GradientRefused" in _log(run, run.ranks("worker")["worker-1"])


@soak
def test_without_a_backup_a_server_dies_before_the_first_checkpoint(start_job, undisturbed, ration):
    plan = PLAN.replace("backup=1", "backup=0")
    run = start_job("--set", "checkpoint.every=100", plan=plan, recipe=rationed(ration))
    run.wait_for_step(5)
    run.kill("server-1")
    allow(ration, 1000)
    expect_same(run, undisturbed, deaths=1)


@soak
@pytest.mark.parametrize("name", ["server-0", "server-1", "leading"])
@pytest.mark.parametrize("delay", [0.0, 0.02, 0.05, 0.1])
def test_a_death_in_a_checkpoint_leaves_none_by_half(start_job, undisturbed, name, delay):
    run = start_job("--set", "checkpoint.every=2")
    run.wait_for_step(6)
    pid = run.pid(named(run, name))
    drafts = run.run_dir / "checkpoints"
    wait_until(lambda: list(drafts.glob(".tmp-*")) or run.process.poll() is not None, "a checkpoint to be begun", 60)
    time.sleep(delay)
    # A draft is there for a moment, and the last may have been missed: then nobody dies, and the rest holds all the same.
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    summary = run.end()
    assert summary["weights_sha256"] == undisturbed
    verified = subprocess.run(
        [sys.executable, "-m", "shoal", "ckpt", "verify", str(run.run_dir)],
        env={**os.environ, "PYTHONPATH": _python_path()},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert verified.returncode == 0, verified.stdout + verified.stderr


@soak
def test_a_server_dies_while_the_last_checkpoint_is_written(start_job, undisturbed):
    run = start_job()
    run.wait_for_step(STEPS - 1)
    pid = run.pid("server-1")
    drafts = run.run_dir / "checkpoints"
    wait_until(lambda: list(drafts.glob(f".tmp-step-*{STEPS}*")) or run.process.poll() is not None, "the last save", 60)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    assert run.end()["weights_sha256"] == undisturbed


@soak
def test_a_worker_that_is_started_by_hand_joins_in_the_middle(start_job, undisturbed, ration):
    run = start_job(recipe=rationed(ration))
    run.wait_for_step(3)
    words = psutil.Process(run.pid("worker-0")).cmdline()
    module = words.index("shoal.serverrun.job.role")
    # A forked process writes its words over those of its server, and blanks over the rest.
    arguments = [word for word in words[module:] if word.strip()]
    arguments[arguments.index("--name") + 1] = "worker-7"
    arguments[arguments.index("--instance-id") + 1] = "0123456789abcdef"
    log = (run.run_dir / "by-hand.log").open("w")
    worker = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": _python_path()},
        stdout=log,
        stderr=log,
    )
    try:
        centers = run.ranks("center")
        wait_until(
            lambda: run.process.poll() is not None or any("3 workers" in _log(run, rank) for rank in centers.values()),
            "a third worker",
            60,
        )
        allow(ration, 1000)
        expect_same(run, undisturbed, deaths=0)
        assert any("3 workers" in _log(run, rank) for rank in centers.values()), "it came too late"
        assert worker.wait(30) == 0
    finally:
        worker.kill()
        worker.wait()
        log.close()


def _log(run, rank):
    return (run.run_dir / "logs" / f"rank-{rank:03d}.log").read_text()


@soak
@pytest.mark.parametrize("update", ["async", "ssp:2", "half:2,0.2"])
def test_other_rules_survive_the_same(start_job, ration, update):
    # Five workers make 110 of 120 passes by it.
    run = start_job(plan=f"ps=2 workers=4 update={update} backup=1", recipe=rationed(ration))
    run.wait_for_step(3)
    run.kill("worker-0")
    run.wait_for_step(6)
    run.kill("server-0")
    run.wait_for_step(9)
    run.kill(run.center())
    allow(ration, 1000)
    summary = run.end()
    assert (summary["status"], summary["steps"]) == ("completed", STEPS)
    assert summary["deaths"] == 3
    samples = sum(event["samples"] for event in _latest(run.events("step")))
    assert samples == STEPS * 8, "samples were counted twice or never"


def _latest(events):
    """Of a step that two log leaders told of, the later telling."""
    return {event["step"]: event for event in sorted(events, key=lambda event: event["t"])}.values()


@soak
def test_a_gradient_that_is_not_finite_ends_the_run_and_names_it(start_job):
    recipe = RECIPE.replace("support.models.paced:build", "support.models.paced:build_poisoned")
    run = start_job(recipe=recipe)
    run.end(expect=1)
    assert "NaN or infinity in the gradient of" in run.output
    summary = read_summary(run.run_dir)
    # Two workers, each started again until it is no use; what a server wrote down in the moment before it is killed may be lost.
    assert summary["status"] == "failed" and summary["deaths"] >= 5
    assert summary["deaths"] - 2 <= summary["not_finite"] <= summary["deaths"]
    assert run.output.count("a gradient of worker-") == summary["not_finite"]
