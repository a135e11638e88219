"""``shoal run``: a script under the supervisor. The culprit is named, and ranks are started again from a checkpoint."""

import json
import signal

import pytest

from support.processes.command import read_events, read_summary

SCRIPT = """
import os, signal, sys
import torch
from torch import nn
import shoal

torch.manual_seed(0)
data = [(torch.randn(8), index % 3) for index in range(64)]
with shoal.Run(seed=1) as run:
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5], gamma=0.5)
    loader = run.loader(data, global_batch=16)
    model, optimizer, scheduler = run.setup(model, optimizer, scheduler, loss=nn.CrossEntropyLoss())
    for epoch in range(loader.epoch, 3):
        for batch in loader:
            if run.step_count == 6 and run.rank == 1 and sys.argv[1] == "kill" and run.world.generation == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            if run.step_count == 6 and sys.argv[1] == "stop" and run.rank == 1 and os.environ.get("SHOAL_RESUME") is None:
                os.kill(os.getpid(), signal.SIGTERM)
            if run.step_count == 3 and run.rank == 1 and sys.argv[1] == "raise":
                raise ValueError("a bug of the script")
            loss = run.forward_backward(batch)
            optimizer.step()
            scheduler.step()
            run.log(loss=loss, noise=torch.rand(()))
            if run.step_count == 5:
                run.save(wait=True)
"""


STREAM_SCRIPT = """
import os, signal, sys
import torch
from torch import nn
from torch.utils.data import IterableDataset
import shoal

class Rows(IterableDataset):
    def __init__(self):
        self.place, self.begun_at = 0, []

    def __iter__(self):
        self.begun_at.append(self.place)
        while self.place < 44:
            generator = torch.Generator().manual_seed(self.place)
            self.place += 1
            yield torch.randn(8, generator=generator), self.place % 3
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]

with shoal.Run(seed=1) as run:
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = Rows()
    loader = run.loader(rows, global_batch=8)
    model, optimizer = run.setup(model, optimizer, loss=nn.CrossEntropyLoss())
    if run.world.generation:
        run.print(f"going on in epoch {loader.epoch} at sample {loader.position.offset}")
    for epoch in range(loader.epoch, 2):
        for batch in loader:
            if run.step_count == 10 and run.rank == 1 and sys.argv[1] == "kill" and run.world.generation == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            run.step(batch)
            if run.step_count == 8:
                run.save(wait=True)
    run.print(f"the stream was begun at {rows.begun_at}")
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_a_killed_rank_of_a_script_is_started_again_and_ends_in_the_same_weights(shoal, script, tmp_path):
    """Left alone, killed after its checkpoint, and stopped and resumed: one hash, with scheduler, loader and random states."""
    plan = "dp=2 zero=1"
    shoal.run("run", script, "--plan", plan, "--run-dir", "alone", "--json", "alone.json", "--", "none")
    wanted = read_summary(tmp_path / "alone")
    assert wanted["status"] == "completed" and wanted["steps"] == 12 and wanted["world_size"] == 2
    assert json.loads((tmp_path / "alone.json").read_text())["weights_sha256"] == wanted["weights_sha256"]
    killed = shoal.run("run", script, "--plan", plan, "--run-dir", "killed", "--max-restarts", "1", "--", "kill")
    assert "rank 1 failed" in killed.stderr and "SIGKILL" in killed.stderr and "going on from step 5" in killed.stderr
    found = read_summary(tmp_path / "killed")
    assert found["weights_sha256"] == wanted["weights_sha256"] and found["restarts"] == 1
    shoal.run("run", script, "--plan", plan, "--run-dir", "stopped", "--", "stop", expect=128 + signal.SIGTERM)
    assert read_summary(tmp_path / "stopped")["status"] == "interrupted"
    shoal.run("run", script, "--plan", plan, "--run-dir", "stopped", "--resume", "--", "stop")
    assert read_summary(tmp_path / "stopped")["weights_sha256"] == wanted["weights_sha256"]
    logged = {name: last_logged(tmp_path / name) for name in ("alone", "killed", "stopped")}
    assert logged["alone"] == logged["killed"] == logged["stopped"]


def last_logged(run_dir):
    return [event["values"] for event in read_events(run_dir) if event["kind"] == "log"][-1]


def test_a_rank_killed_in_the_middle_of_a_stream_is_started_again_and_ends_in_the_same_weights(shoal, tmp_path):
    """The stream has 44 samples, so step 8 of 8 samples each is its second epoch's sample 16, and step 10 sample 32."""
    (tmp_path / "stream.py").write_text(STREAM_SCRIPT)
    shoal.run("run", "stream.py", "--plan", "dp=2", "--run-dir", "alone", "--", "none")
    wanted = read_summary(tmp_path / "alone")
    assert wanted["status"] == "completed" and wanted["steps"] == 12
    killed = shoal.run("run", "stream.py", "--plan", "dp=2", "--run-dir", "killed", "--max-restarts", "1", "--", "kill")
    assert "SIGKILL" in killed.stderr and "going on in epoch 1 at sample 16" in killed.stdout + killed.stderr
    found = read_summary(tmp_path / "killed")
    assert found["weights_sha256"] == wanted["weights_sha256"]
    assert found["restarts"] == 1 and found["steps"] == wanted["steps"]
    # Reading the epoch again from its beginning ends in the same weights too; the dataset's state makes that needless.
    assert "the stream was begun at [16" in killed.stdout + killed.stderr


def test_a_scripts_own_error_names_its_rank_and_wrong_requests_start_nothing(shoal, script, tmp_path):
    failed = shoal.run("run", script, "--nproc", "2", "--run-dir", "failed", "--", "raise", expect=1)
    assert "rank 1 failed at step 3" in failed.stderr and "ValueError: a bug of the script" in failed.stderr
    assert read_summary(tmp_path / "failed")["status"] == "failed"
    for arguments, words in (
        (("missing.py",), "there is no script missing.py"),
        ((script, "--plan", "dp=2 tp=x"), "tp"),
        ((script, "--plan", "dp=2", "--nproc", "3"), "3"),
        ((script, "--set", "train.steps=3"), "takes those of elastic"),
        ((script, "--plan", "ps=1 workers=2"), "parameter servers run recipes"),
    ):
        refused = shoal.run("run", *arguments, expect=2)
        assert words in refused.stderr, (arguments, refused.stderr)
