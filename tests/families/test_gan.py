"""A GAN is the GAN of one process, or refused, under every plan: two models and two optimizers in one run."""

import json

import torch

from families.catalogue import GAN, PLANS
from families.gan import judge, own_loop, own_loops, plain
from families.sweep import RESULTS, cell
from shoal.testing.ranks import run_on_ranks


def test_a_gan_is_that_of_one_process_or_refused_as_its_row_of_the_table_says():
    (alone, whole), reference = own_loop(None, None), plain(1)
    assert all(torch.equal(one, reference[name]) for name, one in alone.items())
    # Data parallelism is what is looked at here, and not the same sums by accident.
    assert any(not torch.equal(one, reference[name]) for name, one in plain(2).items())
    first, second = run_on_ranks(own_loops, 2, deadline_seconds=120.0)
    found, kept = judge(first, second), json.loads(RESULTS.read_text())[GAN]
    statuses = {plan: {row["status"] for row in rows} for plan, rows in found.items()}
    wanted = {plan: {"refused" if plan in ("pp=2", "cp=2") else "proven"} for plan in PLANS}
    assert statuses == wanted
    assert {plan: {row["status"] for row in rows} for plan, rows in kept.items()} == statuses
    assert all(cell(found[plan]) == cell(kept[plan]) for plan in found if plan != "tp=2")
    assert first["tp=2", "float32"][1] < whole, "each rank has a part of both models"
    stages, parts = found["pp=2"][0]["reason"], found["cp=2"][0]["reason"]
    assert "is model 2 of this run, and pp=2 leaves each rank some stages" in stages and "use the plan 'dp=2" in stages
    assert "cp=2 gives each rank a part of the sequence" in parts and "use the plan 'dp=2'" in parts
