"""The model is built once for all ranks of a machine: the same bits as before, fewer builds, and a way out where it cannot be."""

import contextlib
import os
import re
import signal
import subprocess
import sys

import psutil
import pytest

from shoal.launch import forkclient
from shoal.launch.forkclient import ForkClient
from shoal.launch.process import Streams
from support.processes import warm
from support.processes.command import read_summary, wait_until

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="ranks are forked on Linux only")
MODULE = """
import os, random, subprocess, threading, time
import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

def data():
    drawn = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(32, 8, generator=drawn), torch.randint(0, 3, (32,), generator=drawn))

def fits():
    with open("builds.txt", "a") as file:
        file.write(f"{os.getpid()}\\n")
    print("built with", round(random.random() + float(np.random.rand()), 6))
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3))

def with_thread():
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    return fits()

KEPT = []

def with_file():
    KEPT.append(open("builds.txt"))
    return fits()

def with_process():
    KEPT.append(subprocess.Popen(["sleep", "5"]))
    return fits()

def dies_alone():
    if "RANK" not in os.environ and "SHOAL_RUN_DIR" in os.environ:
        os.abort()
    return fits()

class Survives(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.calls = fits(), 0
    def forward(self, x):
        self.calls += 1
        self.look()
        return self.inner(x)
    def look(self):
        pass

class Dies(Survives):
    def look(self):
        if self.training and self.calls == 3 and os.environ.get("SHOAL_GENERATION") == "0" and os.environ["RANK"] == "1":
            os._exit(5)
"""
RECIPE = """
[model]
build = "parts:fits"
[data]
build = "parts:data"
[train]
steps = 4
global_batch = 8
threads = 1
[checkpoint]
every = 1
[telemetry]
tensorboard = false
"""


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "parts.py").write_text(MODULE)
    (tmp_path / "builds.txt").touch()
    path = tmp_path / "own.toml"
    path.write_text(RECIPE)
    return path


def rank_pids(run_dir):
    logs = [path.read_text() for path in sorted((run_dir / "logs").glob("rank-*.log"))]
    return [int(pid) for text in logs for pid in re.findall(r"generation \d+, pid (\d+)", text)]


def builders(folder):
    found = [int(line) for line in (folder / "builds.txt").read_text().split()]
    (folder / "builds.txt").write_text("")
    return found


def train(shoal, recipe, name, *settings, plan="dp=2"):
    words = [word for setting in settings for word in ("--set", setting)]
    builders(shoal.folder)
    done = shoal.run("train", recipe, "--plan", plan, "--run-dir", name, *words)
    ranks = rank_pids(shoal.folder / name)
    by_ranks = [pid for pid in builders(shoal.folder) if pid in ranks]
    return read_summary(shoal.folder / name)["weights_sha256"], by_ranks, done.stderr, shoal.folder / name


def test_no_rank_builds_the_model_and_weights_and_output_are_those_of_ranks_that_do(shoal, recipe):
    shared, by_ranks, told, run_dir = train(shoal, recipe, "shared")
    assert by_ranks == [] and "by itself" not in told
    logs = [(run_dir / "logs" / f"rank-{rank:03d}.log").read_text() for rank in (0, 1)]
    drawn = re.findall(r"built with ([\d.]+)", logs[0])
    assert len(drawn) == 1 and re.findall(r"built with ([\d.]+)", logs[1]) == drawn
    alone, by_ranks, told, _ = train(shoal, recipe, "alone", 'model.build="parts:with_thread"')
    assert len(by_ranks) == 2 and len(set(by_ranks)) == 2
    assert told.count("each rank builds the model by itself: building it left 1 threads open") == 1, told
    assert shared == alone, "the same bits, whoever builds"


@pytest.mark.soak
@pytest.mark.parametrize(
    ("build", "reason"),
    [
        ("with_file", "left 1 open files"),
        ("with_process", "left 1 processes"),
        ("dies_alone", f"the process that built it ended with {-signal.SIGABRT}"),
    ],
)
def test_what_a_fork_cannot_have_is_built_by_each_rank(shoal, recipe, build, reason):
    shared, _, _, _ = train(shoal, recipe, "shared")
    alone, by_ranks, told, _ = train(shoal, recipe, build, f'model.build="parts:{build}"')
    assert len(by_ranks) == 2 and told.count(reason) == 1, told
    assert shared == alone


@pytest.mark.soak
@pytest.mark.parametrize("plan", ["dp=2 zero=3", "tp=2", "pp=2 microbatches=2"])
def test_every_plan_lays_the_shared_model_out(shoal, recipe, plan):
    shared, by_ranks, told, _ = train(shoal, recipe, "shared", plan=plan)
    alone, _, _, _ = train(shoal, recipe, "alone", 'model.build="parts:with_thread"', plan=plan)
    assert by_ranks == [] and "by itself" not in told and shared == alone


@pytest.mark.soak
def test_a_new_generation_shares_a_model_again(shoal, recipe):
    whole, _, _, _ = train(shoal, recipe, "whole", 'model.build="parts:Survives"')
    again, by_ranks, told, run_dir = train(shoal, recipe, "again", 'model.build="parts:Dies"', "elastic.max_restarts=1")
    assert len(rank_pids(run_dir)) == 4 and by_ranks == [], told
    assert again == whole


TEMPLATE = """
import os, time

BLOCK = []

def fill(size, number):
    BLOCK.append(bytearray(os.urandom(1)) * int(size))
    print("filled", number)

def die():
    os.abort()

def hang():
    time.sleep(60)

def main():
    values = dict(line.split(":")[:2] for line in open("/proc/self/smaps_rollup").read().splitlines()[1:])
    own = int(values["Private_Dirty"].split()[0]) * 1024
    print(len(BLOCK[0]) if BLOCK else 0, own < 32 << 20)
"""


@pytest.fixture
def client(tmp_path, monkeypatch):
    monkeypatch.setattr(forkclient, "start_interpreter", warm._start_interpreter)
    (tmp_path / "shared_block.py").write_text(TEMPLATE)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    with contextlib.closing(ForkClient(["shared_block"], environment)) as found:
        found.open()
        yield found


def started(client, folder):
    with (folder / "out").open("w+b") as output:
        process = client.start(
            "shared_block", [], environment=os.environ, streams=Streams(stdout=output.fileno(), stderr=output.fileno())
        )
        assert process is not None and process.wait() == 0
        output.seek(0)
        return output.read().decode()


def prepare(client, *arguments, function="shared_block:fill", seconds=30.0):
    client.wait()
    client.prepare(function, arguments, environment=os.environ, seconds=seconds)
    assert client.wait()


def templates():
    found = []
    for child in psutil.Process().children(recursive=True):
        # A process may end between any two looks at it, and a dead one has no command line.
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if "shared_block" in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
    return found


def test_forks_share_what_was_prepared_and_after_the_release_nobody_holds_it(client, tmp_path):
    prepare(client, str(64 << 20), "once")
    assert [started(client, tmp_path) for _ in range(2)] == [f"filled once\n{64 << 20} True\n"] * 2
    client.release()
    wait_until(lambda: len(templates()) == 1, "the end of the template")
    assert started(client, tmp_path) == "0 True\n"
    prepare(client, "8", "twice")
    assert started(client, tmp_path) == "filled twice\n8 True\n"


def test_a_template_that_dies_or_hangs_keeps_nobody_waiting(client, tmp_path):
    prepare(client, "no number", "x")
    assert client.unprepared == "" and started(client, tmp_path) == "0 True\n"
    prepare(client, function="shared_block:die")
    assert client.unprepared.endswith(f"ended with {-signal.SIGABRT}") and started(client, tmp_path) == "0 True\n"
    prepare(client, "8", "before")
    (template,) = [one for one in templates() if one.parent().pid != os.getpid()]
    template.kill()
    # The server says that it has died, which is no process; the next one is asked for by a new server.
    assert client.start("shared_block", [], environment=os.environ, streams=Streams()) is None
    client.open()
    assert started(client, tmp_path) == "0 True\n"
    prepare(client, function="shared_block:hang", seconds=0.3)
    assert client.problem == "it died or hung while it prepared what ranks share" and templates() == []


def test_no_template_outlives_a_starter_that_is_killed(tmp_path):
    (tmp_path / "shared_block.py").write_text(TEMPLATE)
    script = (
        "import os, signal\nfrom shoal.launch.forkclient import ForkClient\n"
        "client = ForkClient(['shared_block'], os.environ)\nclient.open()\nclient.wait()\n"
        "client.prepare('shared_block:fill', ['8', 'x'], environment=os.environ, seconds=30)\nclient.wait()\n"
        "print('ready', flush=True)\nsignal.pause()\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        below = psutil.Process(process.pid).children(recursive=True)
        assert len(below) == 2
        process.kill()
    wait_until(lambda: not any(one.is_running() and one.status() != "zombie" for one in below), "their ends")
