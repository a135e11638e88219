"""Workers of parameter servers that are groups of ranks, against the synchronous plan that they are a part of.

``bsp`` with N workers computes what ``dp=N`` does: so two workers that are pipelines must end in the bits of ``dp=2 pp=2``,
and two that are tensor-parallel in the weights of ``dp=2 tp=2`` to the last digits of float64.
"""

import json

import pytest
import torch

from shoal.testing.parity import assert_close
from shoal.trainer.build import load_run
from support.processes.command import TINY, read_summary

RECIPE = TINY.replace("steps = 8", "steps = 4")
TIED = RECIPE.replace("dropout = 0.1", "dropout = 0.1\ntied = true")
"""Embedding and head are one weight, which the first and the last stage both hold."""


def train(shoal, tmp_path, plan, *settings, recipe=RECIPE):
    path, run_dir = tmp_path / "tiny.toml", tmp_path / plan.replace(" ", "-")
    path.write_text(recipe)
    words = [word for setting in settings for word in ("--set", setting)]
    shoal.run("train", path, "--plan", plan, "--run-dir", run_dir, *words, timeout=150)
    return run_dir


def losses_of(run_dir):
    """By step; under ``dp`` every rank tells of all, with servers the one that leads the log."""
    lines = [line for path in run_dir.glob("events/rank-*.jsonl") for line in path.read_text().splitlines()]
    events = [event for event in map(json.loads, lines) if event["kind"] == "step"]
    return {event["step"]: event["loss"] for event in events}


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_workers_that_are_pipelines_end_in_the_bits_of_replicated_pipelines(shoal, tmp_path):
    alone = read_summary(train(shoal, tmp_path, "dp=2 pp=2 microbatches=2", recipe=TIED))
    groups = read_summary(train(shoal, tmp_path, "ps=2 workers=2 pp=2 microbatches=2 update=bsp", recipe=TIED))
    assert groups["weights_sha256"] == alone["weights_sha256"]
    assert groups["world_size"] == 6 and len(groups["peak_rss_bytes"]) == 6


@pytest.mark.timeout(400)
@pytest.mark.soak
def test_tensor_parallel_workers_end_in_the_weights_of_tensor_parallel_replicas(shoal, tmp_path):
    settings = ("train.precision=float64", "optim.name=sgd", "optim.lr=0.1")
    alone = train(shoal, tmp_path, "dp=2 tp=2 sp=true", *settings)
    groups = train(shoal, tmp_path, "ps=1 workers=2 tp=2 sp=true update=bsp", *settings)
    wanted, found = (
        {name: parameter.detach() for name, parameter in load_run(run).model.named_parameters()}
        for run in (alone, groups)
    )
    assert all(tensor.dtype == torch.float64 for tensor in found.values())
    assert_close(wanted, found, bound=1e-12)
    ours, theirs = losses_of(groups), losses_of(alone)
    assert ours.keys() == theirs.keys() == {1, 2, 3, 4}
    assert all(ours[step] == pytest.approx(theirs[step], rel=1e-12) for step in ours)
