"""L-BFGS goes on when anyone dies, and walks the same path: the bits of a run in which nobody did."""

import os
import signal

import psutil
import pytest

from support.processes.command import ROOT, Shoal, read_events, read_summary, wait_until

RECIPE = """
[model]
build = "support.models.custom_parts:build_logistic"
[data]
source = "digits"
[train]
steps = 12
global_batch = 2000
threads = 1
seed = 3
precision = "float64"
[telemetry]
tensorboard = false
"""


@pytest.fixture(scope="module")
def shoal(tmp_path_factory):
    command = Shoal(tmp_path_factory.mktemp("lbfgs"))
    (command.folder / "logistic.toml").write_text(RECIPE)
    yield command
    command.end()


def start(shoal, name):
    path = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    plan = "ps=2 workers=2 update=lbfgs backup=1"
    return shoal.start(
        "train", "logistic.toml", "--plan", plan, "--run-dir", name, environment={"PYTHONPATH": path}
    )  # fmt: skip


def finish(shoal, process, name):
    _, told = process.communicate(timeout=110)
    assert process.returncode == 0, told
    return read_summary(shoal.folder / name)


@pytest.fixture(scope="module")
def undisturbed(shoal):
    return finish(shoal, start(shoal, "undisturbed"), "undisturbed")


def find_member(process, name):
    """The process of a role."""
    for child in psutil.Process(process.pid).children(recursive=True):
        words = child.cmdline()
        if "--name" in words and words[words.index("--name") + 1] == name:
            return child.pid
    return None


def has_done(run_dir, step):
    """True when either server has told of this step."""
    ranks = [rank for rank in range(2) if (run_dir / "events" / f"rank-{rank:03d}.jsonl").exists()]
    return any(event["step"] >= step for rank in ranks for event in read_events(run_dir, rank, "step"))


def leader_of(run_dir):
    """The candidate that was elected last."""
    led = [path for path in run_dir.glob("logs/*.log") if "center of epoch" in path.read_text()]
    newest = max(led, key=lambda path: path.stat().st_mtime)
    return newest.read_text().split(",")[0].split()[-1]


@pytest.mark.soak
@pytest.mark.parametrize("victim", ["worker-0", "the leading center", "server-0", "server-1"])
def test_a_death_changes_no_bit(shoal, undisturbed, victim):
    name = victim.replace(" ", "-")
    process = start(shoal, name)
    run_dir = shoal.folder / name
    wait_until(lambda: has_done(run_dir, 3) or process.poll() is not None, "the third step", 90)
    member = leader_of(run_dir) if victim == "the leading center" else victim
    os.kill(wait_until(lambda: find_member(process, member), member), signal.SIGKILL)
    summary = finish(shoal, process, name)
    assert summary["deaths"] == 1
    assert summary["weights_sha256"] == undisturbed["weights_sha256"]
    assert summary["steps"] == undisturbed["steps"] == 12
