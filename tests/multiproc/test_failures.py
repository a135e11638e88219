"""Kill anything: what a run does when a rank, its supervisor or its user ends it."""

import os
import signal
import time

import psutil
import pytest

from support.processes.command import listening_inode, ranks_of, read_events, read_summary, wait_for_step, wait_until

LONG = ("--set", "train.steps=100000")


def start_long(shoal, tiny, *extra, plan="dp=2", real=False):
    process = shoal.start("train", tiny, "--plan", plan, "--run-dir", "run", *LONG, *extra, real=real)
    wait_for_step(shoal.folder / "run", 4)
    return process, ranks_of(process)


def test_a_killed_rank_stops_all_and_is_the_last_thing_printed(shoal, tiny):
    process, ranks = start_long(shoal, tiny)
    os.kill(ranks[1].pid, signal.SIGKILL)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 1
    story = stderr[stderr.index("error:") :]
    assert "rank 1 failed at step" in story and "signal 9 (SIGKILL)" in story and "phase" in story
    assert "rank 0 failed" not in story
    assert read_summary(shoal.folder / "run")["status"] == "failed"
    assert not psutil.wait_procs(list(ranks.values()), timeout=2)[1]


def test_an_exception_on_one_rank_is_shown_with_its_own_traceback(shoal, tiny):
    (shoal.folder / "mine.py").write_text(
        "import os, torch\n"
        "class Model(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(8, 2)\n"
        "        self.calls = 0\n"
        "    def forward(self, x):\n"
        "        self.calls += 1\n"
        "        if self.calls == 4 and os.environ['RANK'] == '1':\n"
        "            raise ValueError('planted in forward')\n"
        "        return self.layer(x)\n"
        "def build():\n"
        "    return Model()\n"
    )
    (shoal.folder / "own.toml").write_text(
        'plan = "dp=2"\n[model]\nbuild = "mine:build"\n[data]\nsource = "synthetic"\nkind = "classes"\nsamples = 64\n'
        "features = [8]\nclasses = 2\n[train]\nsteps = 9\nglobal_batch = 8\n"
    )
    done = shoal.run("train", "own.toml", "--run-dir", "run", expect=1)
    story = done.stderr[done.stderr.rindex("error:") :]
    assert "rank 1 failed at step 4 in phase 'forward': ValueError: planted in forward" in story
    assert 'mine.py", line 10, in forward' in story


def test_a_stopped_rank_is_named_within_the_deadline_with_what_it_missed(shoal, tiny):
    process, ranks = start_long(shoal, tiny, "--set", "elastic.heartbeat_deadline=2.0")
    os.kill(ranks[1].pid, signal.SIGSTOP)
    started = time.monotonic()
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 1
    assert time.monotonic() - started < 20
    story = stderr[stderr.index("error:") :]
    assert "rank 1" in story.splitlines()[0] and "at step" in story.splitlines()[0]
    assert "rank 0" in story, "it says where the others were waiting"


def shared_files(processes):
    """What lies in shared memory under a name and is in use by these processes."""
    used = {one.path for process in processes for one in process.memory_maps()}
    used |= {one.path for process in processes for one in process.open_files()}
    return {path for path in used if path.startswith("/dev/shm/")}


def test_killing_the_supervisor_leaves_nothing_behind(shoal, tiny):
    process, _ = start_long(shoal, tiny, "--set", "data.workers=1", real=True)
    everyone = psutil.Process(process.pid).children(recursive=True)
    assert len(everyone) >= 4, "two ranks and their loaders"
    ports = [
        c.laddr.port for one in everyone for c in one.net_connections(kind="inet") if c.status == psutil.CONN_LISTEN
    ]
    sockets = {port: listening_inode(port) for port in ports}
    assert any(sockets.values()), "the groups of the ranks listen"
    shared = shared_files(everyone)
    process.kill()
    process.wait()
    assert not psutil.wait_procs(everyone, timeout=5)[1]
    # A killed process lets go of its files after it has become a zombie, hence the wait.
    wait_until(lambda: all(inode is None or listening_inode(port) != inode for port, inode in sockets.items()), "ports")
    assert not [path for path in shared if os.path.exists(path)]
    shoal.run("train", tiny, "--plan", "dp=2", "--run-dir", "run", "--resume", "--set", "train.steps=5")


@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.soak), (signal.SIGTERM, 143)]
)
def test_a_signal_finishes_the_step_and_writes_a_checkpoint(shoal, tiny, number, code):
    process, _ = start_long(shoal, tiny, "--set", "checkpoint.every=0", real=True)
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == code
    summary = read_summary(shoal.folder / "run")
    assert summary["status"] == "interrupted" and summary["stopped_by"]
    saved = [path.name for path in (shoal.folder / "run" / "checkpoints").iterdir()]
    assert saved == [f"step-{summary['steps']:08d}"]
    ends = [read_events(shoal.folder / "run", rank, "run_ended")[-1]["step"] for rank in (0, 1)]
    assert ends == [summary["steps"]] * 2, "all ranks stop after the same step"


def test_a_signal_before_the_first_step_is_an_orderly_interruption(shoal, tiny):
    process = shoal.start("train", tiny, "--plan", "dp=2", "--run-dir", "run", "--json", "out.json", *LONG, real=True)
    wait_until(lambda: len(ranks_of(process)) == 2, "both ranks")
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 143 and "Traceback" not in stderr
    summary = read_summary(shoal.folder / "run")
    assert (summary["status"], summary["stopped_by"]) == ("interrupted", "SIGTERM")
    assert (shoal.folder / "out.json").exists()


def test_a_parameter_without_a_gradient_is_named_instead_of_training_apart(shoal):
    (shoal.folder / "mine.py").write_text(
        "import torch\n"
        "class Model(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.used, self.unused = torch.nn.Linear(8, 2), torch.nn.Linear(8, 2)\n"
        "    def forward(self, x):\n"
        "        return self.used(x)\n"
        "def build():\n"
        "    return Model()\n"
    )
    (shoal.folder / "own.toml").write_text(
        'plan = "dp=2"\n[model]\nbuild = "mine:build"\n[data]\nsource = "synthetic"\nkind = "classes"\nsamples = 64\n'
        "features = [8]\nclasses = 2\n[train]\nsteps = 1\nglobal_batch = 8\n"
    )
    done = shoal.run("train", "own.toml", "--run-dir", "run", expect=1)
    assert "parameters 'unused.bias', 'unused.weight' got no gradient" in done.stderr
    assert "train.unused_parameters=true" in done.stderr
    shoal.run("train", "own.toml", "--run-dir", "allowed", "--set", "train.unused_parameters=true")
    shoal.run("train", "own.toml", "--run-dir", "alone", "--plan", "dp=1 microbatches=2")
    both = [read_summary(shoal.folder / name)["weights_sha256"] for name in ("allowed", "alone")]
    assert both[0] == both[1]


def test_a_killed_rank_is_restarted_from_the_newest_checkpoint(shoal, tiny):
    shoal.run("train", tiny, "--plan", "dp=2", "--run-dir", "undisturbed", "--set", "train.steps=80")
    process = shoal.start(
        "train", tiny, "--plan", "dp=2", "--run-dir", "run", "--max-restarts", "2", "--set", "train.steps=80"
    )
    checkpoints = shoal.folder / "run" / "checkpoints"
    wait_until(lambda: any(checkpoints.glob("step-*")), "a checkpoint that is committed")
    os.kill(ranks_of(process)[1].pid, signal.SIGKILL)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    starts = read_events(shoal.folder / "run", 0, "run_started")
    assert [event["generation"] for event in starts] == [0, 1]
    assert starts[1]["step"] > 0, "it went on from a checkpoint"
    ours, theirs = read_summary(shoal.folder / "run"), read_summary(shoal.folder / "undisturbed")
    assert ours["weights_sha256"] == theirs["weights_sha256"]


@pytest.mark.soak
def test_it_gives_up_after_the_last_restart(shoal, tiny):
    process, ranks = start_long(shoal, tiny, "--max-restarts", "1")
    os.kill(ranks[0].pid, signal.SIGKILL)
    second = wait_until(
        lambda: (found := ranks_of(process)) and found.get(1) and found[1] != ranks[1] and found, "a restart"
    )
    wait_until(lambda: len(read_events(shoal.folder / "run", 0, "run_started")) == 2, "the second generation")
    os.kill(second[1].pid, signal.SIGKILL)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 1 and "SIGKILL" in stderr[stderr.rindex("error:") :]


@pytest.mark.parametrize(("policy", "code"), [("stop", 1), pytest.param("skip", 0, marks=pytest.mark.soak)])
def test_a_nan_on_one_rank_is_traced_to_its_rank_and_parameter(shoal, policy, code):
    (shoal.folder / "mine.py").write_text(
        "import os, torch\n"
        "class Poison(torch.autograd.Function):\n"
        "    @staticmethod\n"
        "    def forward(ctx, x, bad):\n"
        "        ctx.bad = bad\n"
        "        return x.clone()\n"
        "    @staticmethod\n"
        "    def backward(ctx, g):\n"
        "        return g * float('nan') if ctx.bad else g, None\n"
        "class Model(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.first = torch.nn.Linear(8, 8)\n"
        "        self.second = torch.nn.Linear(8, 2)\n"
        "    def forward(self, x):\n"
        "        bad = os.environ['RANK'] == '1' and self.second.weight.grad is None and self.steps() == 3\n"
        "        return self.second(Poison.apply(self.first(x), bad))\n"
        "    def steps(self):\n"
        "        return int(os.environ.get('STEP', 0))\n"
        "def build():\n"
        "    model = Model()\n"
        "    calls = [0, -1]\n"
        "    def count(module, inputs):\n"
        "        key = float(inputs[0].sum())\n"
        "        if key != calls[1]:\n"
        "            calls[0] += 1\n"
        "            calls[1] = key\n"
        "        os.environ['STEP'] = str(calls[0])\n"
        "    model.register_forward_pre_hook(count)\n"
        "    return model\n"
    )
    (shoal.folder / "own.toml").write_text(
        'plan = "dp=2"\n[model]\nbuild = "mine:build"\n[data]\nsource = "synthetic"\nkind = "classes"\nsamples = 64\n'
        "features = [8]\nclasses = 2\n[train]\nsteps = 6\nglobal_batch = 8\n[checkpoint]\nevery = 1\n"
    )
    done = shoal.run("train", "own.toml", "--run-dir", "run", "--set", f"train.nonfinite={policy}", expect=code)
    found = read_events(shoal.folder / "run", 0, "non_finite")
    assert [(event["step"], event["culprit_rank"], event["what"]) for event in found] == [(3, 1, "first.bias")]
    if policy == "stop":
        assert "step 3: first.bias is not finite on rank 1" in done.stderr and "step-00000002" in done.stderr
    else:
        skipped = [
            [e["step"] for e in read_events(shoal.folder / "run", rank, "step") if e["skipped"]] for rank in (0, 1)
        ]
        assert skipped == [[3], [3]]
        assert read_summary(shoal.folder / "run")["steps"] == 6


def test_lack_of_memory_is_explained_by_what_holds_it(shoal):
    (shoal.folder / "mine.py").write_text(
        "import torch\n"
        "class Model(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(8, 2)\n"
        "        self.calls = 0\n"
        "    def forward(self, x):\n"
        "        self.calls += 1\n"
        "        if self.calls == 3:\n"
        "            torch.empty(1 << 50)\n"
        "        return self.layer(x)\n"
        "def build():\n"
        "    return Model()\n"
    )
    (shoal.folder / "own.toml").write_text(
        '[model]\nbuild = "mine:build"\n[data]\nsource = "synthetic"\nkind = "classes"\nsamples = 64\n'
        "features = [8]\nclasses = 2\n[train]\nsteps = 6\nglobal_batch = 8\n"
    )
    done = shoal.run("train", "own.toml", "--run-dir", "run", expect=1)
    for word in (
        "out of memory at step 3",
        "weights",
        "gradients",
        "optimizer state",
        "largest tensors",
        "layer.weight",
    ):
        assert word in done.stderr
