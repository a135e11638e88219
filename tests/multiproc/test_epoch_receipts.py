"""At run time, in real ranks: an epoch is every sample once under every plan, over resumes on other numbers of ranks and deaths
of ranks; a loader or a count that is wrong ends the run.
"""

import os

import pytest

from shoal.telemetry.summaryfile import read_summary
from support.processes.command import ROOT, TINY, read_events

SAMPLES = 50
DATA = f"""source = "synthetic"
kind = "tokens"
samples = {SAMPLES}
vocab = 33
validation = 0
test = 0
sequence = 16
"""
PATH = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])


@pytest.fixture
def recipe(shoal):
    path = shoal.folder / "counted.toml"
    text = TINY.replace('source = "stdlib"\nsequence = 16\nlimit_bytes = 200000\n', DATA).replace(
        "every = 3", "every = 0"
    )
    path.write_text('callbacks = ["support.training.sample_bugs:SampleBugs", "support.elastic.deaths:Deaths"]\n' + text)
    return path


def train(shoal, recipe, plan, steps, *, name="run", resume=False, bug="", deaths="", expect=0, **settings):
    changes = {"train.steps": steps, **settings}
    words = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    return shoal.run(
        "train", recipe, "--plan", plan, "--run-dir", name, *words, *(["--resume"] if resume else []), expect=expect,
        environment={"PYTHONPATH": PATH, "SAMPLE_BUG": bug, "DEATHS": deaths},
    )  # fmt: skip


def receipts(shoal, name="run"):
    return [
        (event["epoch"], event["rows"], event["ok"]) for event in read_events(shoal.folder / name, 0, "epoch_receipt")
    ]


def test_an_epoch_is_proved_over_resumes_on_two_three_and_one_rank_and_a_forgotten_sum_is_seen(shoal, recipe):
    batch = {"train.global_batch": 6}  # nine steps an epoch, the last one of two samples: of three ranks one has none
    train(shoal, recipe, "dp=2", 3, **batch)
    train(shoal, recipe, "dp=3", 6, resume=True, **batch)
    assert receipts(shoal) == [], "the epoch is not over"
    done = train(shoal, recipe, "dp=1", 18, resume=True, bug="forget", expect=1, **batch)
    assert "epoch 0 trained on 14 samples and the data has 50: 36 are missing" in done.stderr
    # The checkpoint is of before; the same steps by an honest run.
    train(shoal, recipe, "dp=1", 18, resume=True, **batch)
    assert receipts(shoal)[-2:] == [(0, SAMPLES, True), (1, SAMPLES, True)]
    assert read_summary(shoal.folder / "run")["epochs_proved"] == 2


@pytest.mark.parametrize("bug", ["lose", "repeat"])
def test_a_rank_that_loses_or_repeats_a_sample_ends_the_run(shoal, recipe, bug):
    said = {
        "lose": "49 samples and the data has 50: 1 are missing",
        "repeat": "50 samples and the data has 50: some are not",
    }
    done = train(shoal, recipe, "dp=2", 8, bug=bug, expect=1)
    assert f"epoch 0 trained on {said[bug]}" in done.stderr
    assert receipts(shoal)[0][2] is False


def test_a_count_by_rank_under_tp_is_seen_and_ranks_of_a_replica_are_compared(shoal, recipe):
    done = train(shoal, recipe, "tp=2", 8, bug="twice", expect=1)
    assert "trained on 100 samples and the data has 50: 50 are too many" in done.stderr
    done = train(shoal, recipe, "tp=2", 8, name="apart", bug="repeat", expect=1)
    assert "ranks 0 and 1 compute replica 0 together and trained on different samples" in done.stderr


def test_a_rank_that_reads_slowly_is_named(shoal, recipe):
    done = train(shoal, recipe, "dp=2", 8, bug="slow")
    (slow, *_) = read_events(shoal.folder / "run", 0, "reader_slow")
    assert (
        slow["slow_rank"] == 1 and slow["load_seconds"] > 3 * slow["usual_seconds"] and slow["source"] == "ArraySource"
    )
    assert "rank 1 took" in done.stderr and "look at its disk" in done.stderr


PLANS = [
    "dp=4",
    "dp=3",
    "dp=2 zero=3",
    "dp=2 tp=2",
    "pp=2 microbatches=2",
    "dp=2 pp=2 microbatches=2",
    "pp=2 schedule=pipedream-2bw microbatches=2",
    "cp=2",
    "islands=2 dp=1 sync=diloco:3",
    "islands=2 dp=2 sync=local:2",
]


@pytest.mark.soak
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("order", ["full", "window"])
def test_epochs_are_proved_under_every_plan(shoal, recipe, plan, order):
    batch = 12 if "3" in plan.split()[0] else 8
    settings = {"train.global_batch": batch, "data.order": order, **({"data.window": 1} if order == "window" else {})}
    train(shoal, recipe, plan, 20, **settings)
    proved = 20 * batch // (SAMPLES + batch)
    assert receipts(shoal)[:proved] == [(epoch, SAMPLES, True) for epoch in range(proved)]
    assert read_summary(shoal.folder / "run")["epochs_proved"] >= proved >= 2


@pytest.mark.soak
@pytest.mark.parametrize("plan", ["dp=4", "dp=4 zero=2"])
@pytest.mark.parametrize("point", ["start", "microbatch", "gradients", "update"])
def test_ranks_that_die_take_no_count_with_them(shoal, recipe, plan, point):
    deaths = f"rank 1@4:{point};rank 0@9:{point}"
    train(shoal, recipe, plan, 15, deaths=deaths, **{"elastic.mode": "shrink"})
    found = [one for one in receipts(shoal) if one[2] is not None]
    assert {one[0] for one in found} == {0, 1} and all(one == (one[0], SAMPLES, True) for one in found)
    assert read_summary(shoal.folder / "run")["epochs_proved"] == 2
