"""Workers with batches of different size, in a running job: what they make together is the mean over all samples."""

import json

import pytest
import torch

from support.paramserver.run_in_process import recipe_of, run_inside


def samples_of(outcome):
    """By update: the samples that it is of."""
    events = []
    for path in outcome.run_dir.glob("events/rank-*.jsonl"):
        events += [json.loads(line) for line in path.read_text().splitlines()]
    return {event["step"]: event["samples"] for event in events if event["kind"] == "step"}


@pytest.mark.parametrize("update", ["bsp", "ssp:1"])
def test_the_size_of_units_does_not_change_what_a_step_is(tmp_path, update):
    """Whole steps are made of all their samples, each of which counts once; only the order of the sum is another."""
    plan = f"ps=2 workers=2 update={update}"
    settings = ["train.precision=float64", "train.steps=1" if update == "ssp:1" else "train.steps=6"]
    alike = run_inside(tmp_path / "alike", plan, recipe_of(*settings))
    unequal = run_inside(tmp_path / "unequal", plan, recipe_of(*settings, "paramserver.batch_shares=[3, 1]"))
    assert samples_of(unequal) == samples_of(alike)
    for name, tensor in alike.weights.items():
        torch.testing.assert_close(unequal.weights[name], tensor, rtol=1e-10, atol=1e-12)


def test_a_batch_that_the_workers_do_not_divide_is_worked_off_whole(tmp_path):
    settings = ["train.global_batch=15", "train.steps=4", "paramserver.batch_shares=[3, 1]"]
    found = run_inside(tmp_path, "ps=2 workers=2 update=bsp", recipe_of(*settings))
    assert samples_of(found) == dict.fromkeys(range(1, 5), 15)


def test_fednova_counts_a_worker_by_the_samples_of_its_unit(tmp_path):
    """With one local step each it is a step by the mean over all samples, whatever the sizes: p_i = n_i / n."""
    plan = "ps=2 workers=2 update=bsp"
    settings = ["train.precision=float64"]
    nova = ["paramserver.aggregate=fednova", "paramserver.local_steps=1", "paramserver.batch_shares=[3, 1]"]
    alike = run_inside(tmp_path / "alike", plan, recipe_of(*settings))
    unequal = run_inside(tmp_path / "unequal", plan, recipe_of(*settings, *nova))
    for name, tensor in alike.weights.items():
        torch.testing.assert_close(unequal.weights[name], tensor, rtol=1e-10, atol=1e-12)
