"""A store that grows under a run: all ranks take a version up together where an epoch begins, a run that goes on in the middle of
an epoch has the version that the epoch began with, and every sample of every version comes once.
"""

import os

import numpy as np
import pytest

from shoal.data.store.writer import append_store, build_store
from shoal.data.table import Table, number_column
from shoal.telemetry.summaryfile import read_summary
from support.processes.command import ROOT, read_events
from support.training.appends import rows

RECIPE = """
callbacks = ["support.training.appends:Appends"]
[model]
name = "mlp"
[data]
source = "store"
path = "{store}"
target = "label"
follow = true
validation = {held_out}
test = 0
[train]
steps = 12
global_batch = 6
threads = 1
seed = 3
[optim]
name = "adamw"
lr = 1e-2
[checkpoint]
every = 0
[telemetry]
tensorboard = false
"""
PATH = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])


@pytest.fixture
def train(shoal):
    def run(name, plan, steps, *, append="", resume=False, held_out="0", order="full", every=0, expect=0):
        folder = shoal.folder / f"store-{name}"
        if not folder.exists():
            build_store([rows(0, 20)], str(folder))
        path = shoal.folder / f"{name}.toml"
        path.write_text(RECIPE.format(store=folder, held_out=held_out))
        words = ["--set", f"train.steps={steps}", "--set", f"checkpoint.every={every}"]
        words += ["--resume"] if resume else []
        if plan.startswith("ps="):
            words += ["--set", "callbacks=[]"]
        if order == "window":
            words += ["--set", "data.order=window", "--set", "data.window=1"]
        done = shoal.run(
            "train", path, "--plan", plan, "--run-dir", name, *words, expect=expect,
            environment={"PYTHONPATH": PATH, "APPEND": append, "STORE": str(folder)},
        )  # fmt: skip
        receipts = [
            (one["epoch"], one["rows"], one["ok"]) for one in read_events(shoal.folder / name, 0, "epoch_receipt")
        ]
        return done, read_summary(shoal.folder / name), receipts

    return run


def test_a_version_is_taken_up_by_all_ranks_and_a_resume_keeps_that_of_its_epoch(shoal, train):
    # 20 rows are four steps, 31 are six: the version that is appended after step 2 is trained on from step 5 on.
    _, whole, receipts = train("whole", "dp=2", 10, append="2:20:31")
    assert receipts == [(0, 20, True), (1, 31, True)] and whole["epochs_proved"] == 2
    (grew, *_) = [one for one in read_events(shoal.folder / "whole", 0, "data_grew") if one["added"]]
    assert (grew["epoch"], grew["version"], grew["samples"], grew["added"]) == (1, 2, 31, 11)
    # Another run is stopped in epoch 1, the store grows once more, and it goes on: with version 2 up to the end of its epoch.
    train("parts", "dp=2", 7, append="2:20:31")
    append_store([rows(31, 36)], str(shoal.folder / "store-parts"))
    _, parts, receipts = train("parts", "dp=2", 10, resume=True)
    assert receipts == [(0, 20, True), (1, 31, True)]
    assert parts["weights_sha256"] == whole["weights_sha256"]
    _, parts, receipts = train("parts", "dp=1", 17, resume=True)
    assert receipts[2:] == [(2, 36, True)] and parts["epochs_proved"] == 3


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_an_epoch_of_the_work_queue_reads_the_newest_version_under_an_asynchronous_rule(shoal, train):
    """A run of servers is stopped in an epoch, the store grows, and it goes on: with the old version to the end of its epoch and
    with the new one from an epoch after it on. Every epoch is every sample of its version once."""
    plan = "ps=1 workers=2 update=async"
    train("run", plan, 6, every=1)
    append_store([rows(20, 31)], str(shoal.folder / "store-run"))
    _, _, receipts = train("run", plan, 200, resume=True, every=1)
    assert receipts[:2] == [(0, 20, True), (1, 20, True)] and receipts[-1][1:] == (31, True)
    assert all(ok for *_, ok in receipts) and [one[0] for one in receipts] == list(range(len(receipts)))
    grown = read_events(shoal.folder / "run", 0, "data_grew")
    (first,) = [(one["epoch"], one["version"], one["samples"], one["added"]) for one in grown]
    assert first[1:] == (2, 31, 11) and [one[1] for one in receipts] == [20] * first[0] + [31] * (
        len(receipts) - first[0]
    )
    # A plan without servers goes on from their checkpoint, with the version that its epoch has.
    _, _, receipts = train("run", "dp=2", 220, resume=True)
    assert receipts[-1][1:] == (31, True)


@pytest.mark.soak
@pytest.mark.parametrize("plan", ["dp=1", "dp=3", "tp=2", "dp=2 zero=3"])
@pytest.mark.parametrize("order", ["full", "window"])
def test_what_is_held_out_stays_and_what_is_appended_is_trained_on_under_every_plan(train, plan, order):
    _, summary, receipts = train("run", plan, 15, append="2:20:31", held_out="0.25", order=order)
    assert receipts[:2] == [(0, 15, True), (1, 26, True)] and summary["epochs_proved"] >= 2


@pytest.mark.soak
def test_a_class_that_the_model_has_no_place_for_ends_the_run_with_its_number(shoal, train):
    store = str(shoal.folder / "store-run")
    build_store([rows(0, 20)], store)
    train("run", "dp=2", 2)
    table = rows(20, 24)
    table["label"].values[2] = 7
    append_store([table], store)
    done, _, _ = train("run", "dp=2", 9, resume=True, expect=1)
    assert "has the class 7 in column 'label', and the model was made for 3 classes" in done.stderr


TOKENS = """
[model]
name = "gpt"
layers = 1
hidden = 16
heads = 2
[data]
source = "store"
path = "tokens"
sequence = 16
follow = true
validation = 0
test = 0
[train]
steps = 10
global_batch = 4
seed = 3
[optim]
name = "adamw"
lr = 1e-3
[checkpoint]
every = 0
"""


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_windows_of_appended_tokens_are_taken_up_where_an_epoch_begins(shoal):
    """Forty windows, and sixty once three hundred more tokens are there: receipts of both epochs, over a resume."""
    folder = shoal.folder / "tokens"

    def tokens(count):
        return [Table.of([number_column("tokens", np.arange(count, dtype="<u2") % 50)])]

    build_store(tokens(641), str(folder))
    path = shoal.folder / "tokens.toml"
    path.write_text(TOKENS)
    shoal.run("train", path, "--plan", "dp=2", "--run-dir", "run", "--set", "train.steps=5")
    append_store(tokens(321), str(folder))
    shoal.run("train", path, "--plan", "dp=2", "--run-dir", "run", "--resume", "--set", "train.steps=25")
    receipts = [(one["epoch"], one["rows"], one["ok"]) for one in read_events(shoal.folder / "run", 0, "epoch_receipt")]
    assert receipts == [(0, 40, True), (1, 60, True)]
    grown = [
        (one["version"], one["samples"], one["added"]) for one in read_events(shoal.folder / "run", 0, "data_grew")
    ]
    assert grown == [(2, 60, 20)]
