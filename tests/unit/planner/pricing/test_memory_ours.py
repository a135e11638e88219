"""What the planner says a rank of ours holds, beside what the rooms that train say: from the same recipe and plan.

``shoal train --dry-run`` counts bytes from real shapes (``parallel/state_bytes.py``), equal to the storages of a run. The
planner only divides: it knows neither padding nor the few bytes of a counter, which is what the tolerance is for.
"""

import pytest

from shoal.core.plan import Plan
from shoal.planner.pricing.memory import kept_bytes, price_memory
from shoal.trainer.config import load_recipe
from shoal.trainer.dryrun import dry_run_result
from shoal.trainer.own_parts import OwnPartsHere
from shoal.trainer.request import TrainRequest, prepare
from shoal.tuning.planning import build_job

RECIPE = """
[model]
name = "{name}"
{rest}
[data]
source = "synthetic"
kind = "{kind}"
samples = 64
features = [8, 8]
sequence = 8
vocab = 64
[train]
steps = 2
global_batch = 16
"""
PLANS = (
    "dp=2 zero=2 microbatches=4",
    "dp=4 zero=3 microbatches=2",
    "dp=2 pp=2 zero=2 schedule=1f1b microbatches=4",
    "dp=2 tp=2 pp=2 zero=1 schedule=zb-h1 microbatches=4",
    "pp=2 schedule=zbv microbatches=4",
    "pp=2 schedule=chimera microbatches=4",
)
MORE_PLANS = (
    "dp=2",
    "dp=2 zero=1 microbatches=2",
    "dp=2 zero=2 microbatches=1",
    "dp=2 zero=3 microbatches=1",
    "dp=2 zero=3 microbatches=4",
    "tp=2",
    "dp=2 tp=2 zero=1 microbatches=2",
    "pp=2 schedule=1f1b microbatches=4",
    "pp=2 schedule=gpipe microbatches=4",
    "pp=2 schedule=dualpipe microbatches=4",
)
"""Whose keys are each in ``PLANS`` too."""


def write(folder, name, rest="", kind="tokens"):
    path = folder / "recipe.toml"
    path.write_text(RECIPE.format(name=name, rest=rest, kind=kind))
    return path


def both(folder, path, plan):
    """Bytes of the fullest rank by a dry run and by the planner."""
    prepared = prepare(TrainRequest(recipe=path, plan=plan, run_dir=folder / "run"), own=OwnPartsHere())
    real = dry_run_result(prepared)
    job, _ = build_job(load_recipe(path, ()), "h100:1x8", own=OwnPartsHere())
    priced = max(price_memory(job, Plan.parse(real.plan)), key=lambda memory: memory.weights)
    return real.bytes_per_rank, priced.as_dict()


@pytest.mark.parametrize("plan", [*PLANS, *(pytest.param(plan, marks=pytest.mark.soak) for plan in MORE_PLANS)])
def test_weights_gradients_and_state_are_those_of_a_dry_run(tmp_path, plan):
    path = write(tmp_path, "gpt", "layers = 4\nhidden = 64\nheads = 4\ntied = true")
    real, priced = both(tmp_path, path, plan)
    for part in ("weights", "gradients", "optimizer"):
        assert priced[part] == pytest.approx(real[part], rel=0.03), part


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_model_without_blocks_keeps_what_is_inside_its_pairs(tmp_path, tensor):
    """They were dropped for every layer that is no block: a chain of convolutions kept next to nothing."""
    path = write(tmp_path, "cnn", kind="classes")
    job, _ = build_job(load_recipe(path, ()), "h100:1x8", own=OwnPartsHere())
    layers = job.chain.layers
    assert not job.chain.num_blocks and any(layer.kept.split for layer in layers)
    for layer in layers:
        for recompute in ("none", "selective", "full"):
            found = kept_bytes(layer, tensor=tensor, sequence_parallel=False, context=1, recompute=recompute)
            assert found == layer.kept.whole + (layer.kept.split + layer.kept.scores) / tensor
    held = price_memory(job, Plan(dp=1, tp=tensor, microbatches=2))[0].activations
    kept = (layer.kept for layer in layers)
    assert held == pytest.approx(8 * sum(one.whole + (one.split + one.scores) / tensor for one in kept))
