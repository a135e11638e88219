"""A GAN under data parallelism and ZeRO is the GAN of one process: two models and two optimizers in one run."""

import torch

from families.gan import PLANS, own_loop, own_loops, plain, refusals
from shoal.testing.ranks import run_on_ranks


def test_a_gan_is_that_of_one_process_bit_for_bit():
    alone, wanted = own_loop(None, None), {1: plain(1), 2: plain(2)}
    assert all(torch.equal(one, wanted[1][name]) for name, one in alone.items())
    for found in run_on_ranks(own_loops, 2, deadline_seconds=120.0):
        for plan in PLANS:
            differing = [name for name, one in wanted[2].items() if not torch.equal(found[plan][name], one)]
            assert not differing and set(found[plan]) == set(wanted[2]), (plan, differing)
    # Data parallelism is what is looked at here, and not the same sums by accident.
    assert any(not torch.equal(one, wanted[2][name]) for name, one in wanted[1].items())


def test_two_models_under_a_plan_that_cuts_them_are_refused_with_the_plan_that_can():
    said, _ = run_on_ranks(refusals, 2, deadline_seconds=60.0)
    assert set(said) == {"pp=2 microbatches=2: other", "cp=2: other"}, "the first model is set up"
    stages, parts = said["pp=2 microbatches=2: other"], said["cp=2: other"]
    assert "is model 2 of this run, and pp=2 leaves each rank some stages" in stages and "use the plan 'dp=2" in stages
    assert "cp=2 gives each rank a part of the sequence" in parts and "use the plan 'dp=2'" in parts
