"""Runs with parameter servers prove their epochs, over resumes; a sample that a worker loses or repeats ends the run."""

import json

import pytest

from shoal.core.errors import RequestError
from shoal.serverrun.worker import shares
from support.paramserver.run_in_process import DIGITS, recipe_of, run_inside

SAMPLES = 50
DATA = {"source": "synthetic", "kind": "classes", "samples": SAMPLES, "validation": 0, "test": 0}
BASE = {**DIGITS, "data": DATA}
"""Four steps of 16 samples are an epoch, the last of two: of three shares one is empty."""


def receipts(outcome_or_dir):
    run_dir = getattr(outcome_or_dir, "run_dir", outcome_or_dir)
    events = [json.loads(line) for file in (run_dir / "events").glob("*") for line in file.read_text().splitlines()]
    return [
        (one["epoch"], one["rows"], one["ok"])
        for one in sorted(events, key=lambda one: one["t"])
        if one["kind"] == "epoch_receipt"
    ]


@pytest.mark.parametrize(
    "update",
    ["async", pytest.param("downpour:3,2", marks=pytest.mark.soak), pytest.param("half:2,0", marks=pytest.mark.soak)],
)
def test_epochs_are_proved_over_a_resume(tmp_path, update):
    plan = f"ps=2 workers=3 update={update}"
    recipe = recipe_of("train.global_batch=18", base=BASE)  # three steps an epoch
    first = run_inside(
        tmp_path, plan, recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": 5})})
    )
    assert receipts(first) == [(0, SAMPLES, True)]
    longer = recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": 9})})
    again = run_inside(tmp_path, plan, longer, resume=True)
    assert receipts(again) == [(epoch, SAMPLES, True) for epoch in range(3)], "the sum so far is in the checkpoint"


def test_a_run_that_goes_on_without_the_log_says_which_epoch_it_cannot_prove(tmp_path):
    recipe = recipe_of("train.global_batch=18", "train.steps=4", base=BASE)
    run_inside(tmp_path, "ps=1 workers=3 update=async", recipe)
    longer = recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": 9})})
    again = run_inside(tmp_path, "ps=1 workers=2 update=async", longer, resume=True)
    assert [one[2] for one in receipts(again)] == [True, None, True]


@pytest.mark.parametrize(
    ("bug", "said"), [("lose", "49 samples and the data has 50: 1 are missing"), ("repeat", "some")]
)
def test_a_worker_that_loses_or_repeats_a_sample_ends_the_run(tmp_path, monkeypatch, bug, said):
    honest, calls = shares.own_microbatches, iter(range(10**9))

    def cut(*place):
        found = honest(*place)
        if next(calls) == 2:
            last = found[-1].copy()
            found[-1] = last[:-1] if bug == "lose" else last
            found[-1][0] = found[-1][0] if bug == "lose" else last[1]
        return found

    monkeypatch.setattr(shares, "own_microbatches", cut)
    # Nobody ends the workers here, as a supervisor would: they wait for the server that left until their own deadline.
    recipe = recipe_of("train.steps=6", "paramserver.deadline=2", base=BASE)
    with pytest.raises(RequestError, match=f"epoch 0 trained on .*{said}"):
        run_inside(tmp_path, "ps=1 workers=2 update=async", recipe)
    assert receipts(tmp_path / "run")[0][2] is False
