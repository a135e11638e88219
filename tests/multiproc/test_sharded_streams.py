"""Datasets that shard themselves: every sample once in an epoch, whatever the shards' lengths, and after every kill."""

import os
import signal

import pytest

from shoal.core.errors import RequestError
from shoal.data.loading.steploader import StepLoader
from shoal.data.options import LoaderOptions
from shoal.testing.ranks import run_on_ranks
from support.processes.command import ROOT, ranks_of, read_summary, wait_until
from support.training.streams import SIZE, Dealt, Redealt, row_number

PATH = {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}
KINDS = {"dealt": Dealt, "redealt": Redealt}
RECIPE = """
[model]
build = "support.models.pausing:build"
args = {{ folder = "{folder}", passes = {passes} }}
[data]
build = "support.training.streams:{build}"
[train]
steps = 10
global_batch = 6
threads = 1
[optim]
name = "adamw"
lr = 1e-2
[checkpoint]
every = 2
[telemetry]
tensorboard = false
"""


def open_loader(world, kind, **options):
    loader = StepLoader(KINDS[kind](), global_batch=6, options=LoaderOptions(**options), world=world)
    loader.place(replica=world.rank, num_replicas=world.size)
    return loader


def read(loader, steps):
    """The rows that this replica got in each step, with the step's samples and epoch."""
    found = []
    for batch in loader.steps(steps):
        rows = [row_number(row) for one in batch.microbatches for row in one.inputs[0]]
        found.append([batch.epoch, batch.num_samples, *rows])
    return found


def read_in_pieces(world, kind, pieces, **options):
    """A new loader for every piece, from what the one before it saved."""
    state, found, saved = None, [], []
    for steps in pieces:
        loader = open_loader(world, kind, **options)
        if state is not None:
            loader.load_state_dict(state)
        found += read(loader, steps)
        state = loader.state_dict()
        saved.append(state)
        loader.close()
    return {"steps": found, "saved": saved}


def read_by_kinds(world):
    whole = read_in_pieces(world, "dealt", [9])
    return {
        "whole": whole,
        "pieces": read_in_pieces(world, "dealt", [2, 1, 1, 2, 3]),
        "ahead": read_in_pieces(world, "dealt", [4, 5], num_workers=2),
        "redealt": read_in_pieces(world, "redealt", [2, 2, 5]),
    }


def rows_of(ranks, epoch):
    return sorted(row for one in ranks for step in one["steps"] if step[0] == epoch for row in step[2:])


def go_on(world, state):
    loader = open_loader(world, "redealt")
    loader.load_state_dict(state)
    found = read(loader, 5)
    loader.close()
    return {"steps": found}


def test_each_sample_comes_once_in_an_epoch_and_after_every_resume():
    """22 rows over 3 replicas: shards of 8, 7 and 7, so that one replica has a last step when the others have none."""
    ranks = run_on_ranks(read_by_kinds, 3, environment=PATH)
    whole = [one["whole"] for one in ranks]
    assert [len(one["steps"]) for one in whole] == [9, 9, 9]
    for epoch in (0, 1):
        assert rows_of(whole, epoch) == list(range(SIZE)), epoch
    assert [step[:2] for step in whole[0]["steps"]][:5] == [[0, 6], [0, 6], [0, 6], [0, 4], [1, 6]]
    for name in ("pieces", "ahead", "redealt"):
        assert [one[name]["steps"] for one in ranks] == [one["steps"] for one in whole], name
    assert all(one["pieces"]["saved"] == ranks[0]["pieces"]["saved"] for one in ranks), "one value for all replicas"
    saved = ranks[0]["redealt"]["saved"][0]
    before = sorted(row for one in whole for step in one["steps"][:2] for row in step[2:])
    fewer = run_on_ranks(go_on, 2, saved, environment=PATH)
    assert sorted(before + rows_of(fewer, 0)) == list(range(SIZE)), "what was left, dealt out to two"
    assert len(rows_of(fewer, 1)) == len(set(rows_of(fewer, 1))) == 18


def test_another_number_of_replicas_is_refused_by_name():
    saved = run_on_ranks(read_in_pieces, 2, "dealt", [2], environment=PATH)[0]["saved"][0]
    alone = StepLoader(Dealt(), global_batch=6)
    alone.load_state_dict(saved)
    said = (
        r"Dealt shards itself, the checkpoint has the places of 2 replicas in their shards, 12 samples into epoch 0, and this "
        r"run has 1 replicas: .*resume with 2 replicas .*reshard\(states, replica, num_replicas\)"
    )
    with pytest.raises(RequestError, match=said):
        alone.next()


@pytest.mark.soak
def test_a_killed_run_goes_on_to_the_same_weights(shoal):
    def write(passes, build="dealt"):
        path = shoal.folder / f"{build}-{passes}.toml"
        path.write_text(RECIPE.format(folder=shoal.folder, passes=passes, build=build))
        return path.name

    (shoal.folder / "go").touch()
    shoal.run("train", write(0), "--plan", "dp=2", "--run-dir", "whole", environment=PATH)
    (shoal.folder / "go").unlink()
    # 11 rows each, three a step: the fourth step is short, and the tenth step is of the third epoch.
    process = shoal.start(
        "train", write(3), "--plan", "dp=2", "--run-dir", "cut", "--max-restarts", "1", environment=PATH
    )
    checkpoints = shoal.folder / "cut" / "checkpoints"
    wait_until(lambda: list(checkpoints.glob("step-*")) and list(shoal.folder.glob("held-*")), "a checkpoint", 60)
    os.kill(ranks_of(process)[1].pid, signal.SIGKILL)
    (shoal.folder / "go").touch()
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0 and "going on from step 2, " in stderr, stderr
    whole, cut = (read_summary(shoal.folder / run) for run in ("whole", "cut"))
    assert cut["weights_sha256"] == whole["weights_sha256"]
    few = ("--set", "train.steps=2")
    shoal.run("train", write(0), "--plan", "dp=2", "--run-dir", "other", *few, environment=PATH)
    said = shoal.run("train", write(0), "--plan", "dp=3", "--run-dir", "other", "--resume", expect=2, environment=PATH)
    assert "the places of 2 replicas in their shards, 12 samples into epoch 0, and this run has 3" in said.stderr
    shoal.run("train", write(0, "redealt"), "--plan", "dp=2", "--run-dir", "moved", *few, environment=PATH)
    shoal.run("train", write(0, "redealt"), "--plan", "dp=3", "--run-dir", "moved", "--resume", environment=PATH)
