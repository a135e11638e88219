"""At run time, in real ranks: an epoch is every sample once for every kind of data, over a resume on another number of ranks; and
where ranks die between the versions of a store that grows.
"""

import csv
import os

import numpy as np
import pytest

from shoal.data.store.writer import append_store, build_store
from shoal.telemetry.summaryfile import read_summary
from support.processes.command import ROOT, read_events
from support.training.appends import rows

PATH = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
MLP = 'name = "mlp"\nhidden = 8'
GPT = 'name = "gpt"\nlayers = 1\nhidden = 16\nheads = 2'
RECIPE = """
plan = "dp=2"
callbacks = ["support.training.sample_bugs:SampleBugs", "support.training.appends:Appends", "support.elastic.deaths:Deaths"]
[model]
{model}
[data]
{data}
[train]
steps = 12
global_batch = 12
threads = 1
seed = 3
[optim]
name = "adamw"
lr = 1e-3
[checkpoint]
every = 0
[telemetry]
tensorboard = false
"""
SHARES = "validation = 0.2\ntest = 0"
ALL = "validation = 0\ntest = 0"


def write_rows(path):
    """60 rows of ten users, six of each."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["user", "a", "b", "state"])
        writer.writerows([f"u{n % 10}", np.sin(n), n / 100, ["idle", "load", "fault"][n % 3]] for n in range(60))


def table(folder, shoal):
    write_rows(folder / "rows.csv")
    return MLP, f'source = "table"\npath = "rows.csv"\ninputs = ["a", "b"]\ntarget = "state"\n{SHARES}', 48


def cut(folder, shoal):
    model, data, samples = table(folder, shoal)
    return model, f'{data}\n[data.cut]\nby = "user"\nkey = "user"', samples


def split(folder, shoal):
    write_rows(folder / "rows.csv")
    shoal.run("data", "build", "rows.csv", "rows")
    shares = ("--validation", 0.2, "--test", 0)
    shoal.run("data", "split", "rows", "--by", "user", "--key", "user", *shares, "--save", "users")
    data = 'source = "store"\npath = "rows"\nsplit = "users"\ninputs = ["a", "b"]\ntarget = "state"\n[data.labels]'
    return MLP, data, 48


def text(folder, shoal):
    for name, size in (("a.txt", 500), ("b.txt", 301)):
        (folder / name).write_bytes(b"words " * 100)
        os.truncate(folder / name, size)
    # Each file ends with a byte 0, and a sample reads one byte more than its 16.
    return GPT, f'source = "text"\npath = "."\npattern = "*.txt"\nsequence = 16\n{ALL}', (500 + 1 + 301 + 1 - 1) // 16


def tokens(folder, shoal):
    np.save(folder / "ids.npy", np.arange(790) % 50)
    return GPT, f'source = "tokens"\npath = "ids.npy"\nsequence = 16\n{ALL}', 789 // 16


def digits(folder, shoal):
    pytest.importorskip("sklearn")
    return MLP, 'source = "digits"\nvalidation = 0.97\ntest = 0', 1797 - 1743


SOURCES = [table, cut, split, text, tokens, digits]
CHEAP = [pytest.param(one, marks=[] if one is cut else [pytest.mark.soak]) for one in SOURCES]


def train(shoal, recipe, name, *words, expect=0, **environment):
    return shoal.run(
        "train", recipe, "--run-dir", name, *words, expect=expect, environment={"PYTHONPATH": PATH, **environment}
    )


def receipts(shoal, name="run"):
    found = [
        (event["epoch"], event["rows"], event["ok"]) for event in read_events(shoal.folder / name, 0, "epoch_receipt")
    ]
    return [one for one in found if one[2] is not None]


@pytest.mark.parametrize("source", CHEAP)
def test_epochs_of_every_kind_of_data_are_proved_over_a_resume_on_another_number_of_ranks(shoal, source):
    model, data, samples = source(shoal.folder, shoal)
    recipe = shoal.folder / "recipe.toml"
    recipe.write_text(RECIPE.format(model=model, data=data))
    train(shoal, recipe, "run", "--set", "train.steps=2")
    assert receipts(shoal) == [], "the epoch is not over"
    train(shoal, recipe, "run", "--plan", "dp=3", "--resume", "--set", f"train.steps={2 * -(-samples // 12)}")
    assert receipts(shoal) == [(0, samples, True), (1, samples, True)]
    assert read_summary(shoal.folder / "run")["epochs_proved"] == 2


@pytest.mark.soak
@pytest.mark.parametrize("source", SOURCES)
def test_a_lost_sample_of_every_kind_of_data_ends_the_run(shoal, source):
    model, data, samples = source(shoal.folder, shoal)
    recipe = shoal.folder / "recipe.toml"
    recipe.write_text(RECIPE.format(model=model, data=data))
    done = train(shoal, recipe, "run", SAMPLE_BUG="lose", expect=1)
    assert f"epoch 0 trained on {samples - 1} samples and the data has {samples}: 1 are missing" in done.stderr


@pytest.fixture
def growing(shoal):
    store, recipe = shoal.folder / "store", shoal.folder / "recipe.toml"
    build_store([rows(0, 20)], str(store))
    data = f'source = "store"\npath = "store"\ntarget = "label"\nfollow = true\n{ALL}'
    recipe.write_text(RECIPE.format(model=MLP, data=data).replace("global_batch = 12", "global_batch = 6"))
    return recipe, store


@pytest.mark.soak
@pytest.mark.parametrize("point", ["start", "microbatch", "gradients", "update"])
@pytest.mark.parametrize("step", [3, 4, 5])
def test_ranks_that_die_where_a_version_is_taken_up_lose_and_repeat_nothing(shoal, growing, point, step):
    """20 rows are four steps, 31 six: what the second appends is taken up behind the fourth, and rank 0 dies in the eighth."""
    recipe, store = growing
    deaths = f"rank 1@{step}:{point};rank 0@8:{point}"
    words = ("--plan", "dp=3", "--set", "elastic.mode=shrink", "--set", "train.steps=11")
    train(shoal, recipe, "run", *words, DEATHS=deaths, APPEND="2:20:31", STORE=str(store))
    found = read_summary(shoal.folder / "run")
    assert found["elastic"]["views"] == 3 and found["epochs_proved"] == 2
    assert set(receipts(shoal)) == {(0, 20, True), (1, 31, True)}


@pytest.mark.soak
@pytest.mark.parametrize("step", [2, 4, 6])
def test_a_run_that_is_killed_between_two_appends_proves_each_epoch_of_its_version(shoal, growing, step):
    recipe, store = growing
    saves = ("--set", "checkpoint.every=1", "--set", "checkpoint.background=false")
    train(
        shoal, recipe, "run", *saves, DEATHS=f"@{step}:gradients", APPEND="1:20:31", STORE=str(store), expect=1
    )  # fmt: skip
    append_store([rows(31, 36)], str(store))
    train(shoal, recipe, "run", *saves, "--plan", "dp=3", "--resume", "--set", "train.steps=17")
    # A kill in epoch 0 is before version 2 was taken up: the epoch after it has the newest, which is then the third.
    sizes = [20, 36, 36] if step <= 4 else [20, 31, 36]
    steps = np.cumsum([-(-size // 6) for size in sizes])
    expected = [(epoch, size, True) for epoch, size in enumerate(sizes) if steps[epoch] <= 17]
    assert receipts(shoal) == expected and len(expected) >= 2
    assert read_summary(shoal.folder / "run")["epochs_proved"] == len(expected)
