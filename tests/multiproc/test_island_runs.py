"""Runs with islands: a resume between rounds has every bit, a checkpoint moves between policies, a stop comes to all alike."""

import math
import os
import signal

import pytest
import torch

from shoal.checkpoint.reader import read
from support.processes.command import ranks_of, read_events, read_summary, wait_for_step

SETTINGS = ("--set", "train.steps=11", "--set", "train.global_batch=12", "--set", "checkpoint.every=5")
PLANS = (
    "dp=3 sync=pushsum:random",
    "islands=2 dp=2 zero=3 sync=stream:4,1,2 compress=int4",
    *(
        pytest.param(plan, marks=pytest.mark.soak)
        for plan in (
            "dp=2 sync=diloco:3",
            "dp=2 sync=stream:4,1,2 compress=int4",
            "islands=2 dp=2 zero=3 sync=easgd:4",
            "dp=2 sync=sparse:3,0.1",
            "dp=2 sync=slowmo:4",
            "dp=2 sync=local:2@6",
            "dp=4 sync=gossip:exponential",
            "dp=3 sync=gossip:ring,2 compress=int4",
            "dp=2 sync=diloco:3 compress=powersgd:2",
        )
    ),
)


def cut_back(run, step):
    """Take away what was saved after a step, as if the run had been killed before it was."""
    saved = sorted((run / "checkpoints").iterdir())
    kept = [path for path in saved if path.name <= f"step-{step:08d}"]
    assert kept and kept != saved
    for path in saved:
        if path not in kept:
            for file in sorted(path.rglob("*"), reverse=True):
                file.unlink()
            path.rmdir()
    (run / "summary.json").unlink()


@pytest.mark.parametrize("plan", PLANS)
def test_a_run_that_goes_on_between_two_rounds_ends_in_the_same_weights(shoal, tiny, tmp_path, plan):
    run = tmp_path / "run"
    shoal.run("train", tiny, "--plan", plan, "--run-dir", run, *SETTINGS)
    whole = read_summary(run)["weights_sha256"]
    cut_back(run, 5)
    done = shoal.run("train", tiny, "--plan", plan, "--run-dir", run, "--resume", *SETTINGS)
    assert "going on from step 5" in done.stderr and "mean" not in done.stderr
    assert read_summary(run)["weights_sha256"] == whole


def test_a_checkpoint_moves_between_policies_by_the_mean_and_says_so(shoal, tiny, tmp_path):
    run = tmp_path / "run"

    def go_on(plan, steps):
        more = ("--set", f"train.steps={steps}", "--set", "train.global_batch=12")
        return shoal.run("train", tiny, "--plan", plan, "--run-dir", run, "--resume=auto", *more).stderr

    go_on("dp=2 sync=diloco:3", 4)
    assert "goes on from the mean of their weights" in go_on("dp=2", 6)
    assert "not one of 3 islands with sync=gossip" in go_on("dp=3 sync=gossip:ring", 8)
    assert "not one of 2 islands with sync=gossip" in go_on("dp=2 sync=gossip:ring", 10)
    assert read_summary(run)["steps"] == 10


def unsent(run, step, islands):
    """What islands have not sent, and what was not sent back to them, by parameter, added up."""
    found = {}
    for name, tensor in read(run / "checkpoints" / f"step-{step:08d}").tensors.items():
        if name.startswith(f"islands/diloco/{islands}/") and "residual/" in name:
            parameter = name.partition("residual/")[2]
            found[parameter] = found.get(parameter, 0) + tensor.double()
    return found


def test_what_was_not_sent_stays_whole_when_the_number_of_islands_changes(shoal, tiny, tmp_path):
    """Islands whose parameters ZeRO cuts become others that hold them whole, and no round comes between the two checkpoints."""
    run = tmp_path / "run"
    for plan, steps in (
        ("islands=2 dp=2 zero=1 sync=diloco:3 compress=int4", 4),
        ("dp=3 sync=diloco:3 compress=int4", 5),
    ):
        more = ("--set", f"train.steps={steps}", "--set", "train.global_batch=12", "--resume=auto")
        told = shoal.run("train", tiny, "--plan", plan, "--run-dir", run, *more).stderr
    assert "what its islands had not sent is the first island's to send" in told
    before, after = unsent(run, 4, 2), unsent(run, 5, 3)
    assert (
        before.keys() == after.keys() and len(before) > 5 and all(bool(one.abs().max() > 0) for one in before.values())
    )
    for name, one in before.items():
        # A round divides by the number of islands: the mean of what is still to come is what stays.
        torch.testing.assert_close(after[name] / 3, one / 2, rtol=1e-5, atol=1e-9)


def test_rounds_are_events_and_all_islands_hold_them_at_the_same_steps(shoal, tiny, tmp_path):
    run = tmp_path / "run"
    told = shoal.run("train", tiny, "--plan", "dp=2 sync=local:3", "--run-dir", run, *SETTINGS).stdout
    rounds = [[(one["step"], one["round"]) for one in read_events(run, rank, "round")] for rank in range(2)]
    assert rounds[0] == rounds[1] == [(3, 0), (6, 1), (9, 2)]
    summary = read_summary(run)
    sent = summary["exchange"]
    # Of two ranks each sends half of a sum to make it and half to tell it: a whole model each, in 3 of the steps.
    whole = sent["dense_bytes"] / 2 / summary["steps"]
    assert sent["rounds"] == 3 and 0 <= sent["bytes"] - 2 * 3 * whole < 2000, (
        "with what islands tell each other besides"
    )
    assert abs(sent["ratio"] - summary["steps"] / 3) < 0.05 and "in 3 rounds, " in told


def test_rounds_that_follow_the_validation_loss_do_so_after_a_resume_too(shoal, tiny, tmp_path):
    """And the distance between islands is in their events and in the summary."""
    run = tmp_path / "run"
    more = ("replicas.interval=adacomm", "replicas.distance=1", "eval.every=2", "optim.lr=0.02")
    settings = (*SETTINGS, *(word for one in more for word in ("--set", one)))
    shoal.run("train", tiny, "--plan", "dp=2 sync=local:9", "--run-dir", run, *settings)
    whole, rounds = read_summary(run)["weights_sha256"], read_events(run, 1, "round")
    losses = {one["step"]: one["loss"] for one in read_events(run, 1, "evaluated")}
    expected, since = [], 0
    for step in range(1, 12):
        since += 1
        known = [losses[other] for other in sorted(losses) if other < step]
        # Wang and Joshi 2019, arXiv 1810.08313: tau_j = ceil(sqrt(F_j / F_0) tau_0). Written here once more.
        if since >= (math.ceil(9 * (known[-1] / known[0]) ** 0.5) if known else 9):
            expected, since = [*expected, step], 0
    assert [one["step"] for one in rounds] == expected and expected not in ([], [9])
    assert all(one["distance"] > 0 for one in rounds)
    assert read_events(run, 0, "round")[-1]["distance"] == rounds[-1]["distance"]
    assert read_events(run, 0, "islands") and math.isfinite(read_summary(run)["island_distance"])
    cut_back(run, 5)
    shoal.run("train", tiny, "--plan", "dp=2 sync=local:9", "--run-dir", run, "--resume", *settings)
    assert read_summary(run)["weights_sha256"] == whole


def test_an_island_that_is_killed_between_rounds_is_named_and_the_run_ends_in_the_same_bits(shoal, tiny, tmp_path):
    plan = ("--plan", "dp=2 sync=diloco:7", "--set", "train.steps=60", "--set", "train.global_batch=12")
    more = ("--set", "checkpoint.every=3", "--set", "elastic.max_restarts=1")
    shoal.run("train", tiny, *plan, *more, "--run-dir", tmp_path / "alone")
    run = tmp_path / "run"
    process = shoal.start("train", tiny, *plan, *more, "--run-dir", run)
    wait_for_step(run, 10)
    os.kill(ranks_of(process)[1].pid, signal.SIGKILL)
    _, told = process.communicate(timeout=90)
    assert process.returncode == 0 and "rank 1" in told and "SIGKILL" in told, told
    assert read_summary(run)["weights_sha256"] == read_summary(tmp_path / "alone")["weights_sha256"]


def test_a_request_to_stop_ends_all_islands_at_one_step(shoal, tiny, tmp_path):
    """Islands hear of it when a fragment was just sent, so there is always an exchange under way then."""
    run = tmp_path / "run"
    process = shoal.start(
        "train", tiny, "--plan", "dp=2 sync=stream:7,1,3", "--run-dir", run, "--set", "train.steps=100000"
    )
    wait_for_step(run, 3)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143 and read_summary(run)["status"] == "interrupted"
    last = [read_events(run, rank, "step")[-1]["step"] for rank in range(2)]
    assert last[0] == last[1] and last[0] % 7 == 0


@pytest.mark.soak
def test_rounds_by_the_clock_are_held_at_the_same_steps(shoal, tiny, tmp_path):
    run = tmp_path / "run"
    shoal.run("train", tiny, "--plan", "dp=2 sync=local:0.05s", "--run-dir", run, "--set", "train.steps=60")
    rounds = [[one["step"] for one in read_events(run, rank, "round")] for rank in range(2)]
    assert rounds[0] == rounds[1] and rounds[0]
