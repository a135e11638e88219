"""A loss over the global batch: gathered rows and their gradients are those of one process, for any parts of the batch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoal
from shoal.comm.global_batch import ALONE, Replicas, gathering, refuse_empty, replicas_of, why_not_joined
from shoal.comm.mesh import build_mesh
from shoal.core.axes import Axis
from shoal.core.errors import Refusal, RequestError, RunError
from shoal.core.plan import Plan
from shoal.testing.ranks import run_on_ranks
from shoal.trainer.config import read_recipe
from shoal.verify.mutants.catalogue import MUTANTS, own_recipe
from shoal.verify.proof import Prover
from shoal.verify.request import build_subject, check_plan
from shoal.verify.session import try_mutant

GATHERED = [name for name in MUTANTS if "gathered rows" in name]


def towers():
    torch.manual_seed(3)
    return nn.ModuleList([nn.Linear(6, 4), nn.Linear(6, 4)]).double()


def samples(count):
    return torch.randn(2, count, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def contrast(left, right, own):
    """The loss of some rows against all: ``own`` are the places of the left ones."""
    return F.cross_entropy(3.0 * left @ right.T, own)


def one_process(count):
    """Gradients of the mean over all rows, both ways round."""
    model, (a, b) = towers(), samples(count)
    left, right, own = model[0](a), model[1](b), torch.arange(count)
    ((contrast(left, right, own) + contrast(right, left, own)) / 2).backward()
    return [parameter.grad for parameter in model.parameters()]


def gradients_on_ranks(world, counts, form):
    """The sum over replicas of the gradients of their shares, in a loss over all rows or over the replica's own."""
    mesh = build_mesh(world, Plan(dp=world.size))
    channel, total = mesh.channel(Axis.DATA), sum(counts)
    start = sum(counts[: world.rank])
    model, (a, b) = towers(), samples(total)[:, start : start + counts[world.rank]]
    with gathering(replicas_of(Plan(dp=world.size), channel)):
        left, right = model[0](a), model[1](b)
        if form == "own rows":
            own = torch.arange(start, start + len(a))
            loss = contrast(left, shoal.all_gather(right), own) + contrast(right, shoal.all_gather(left), own)
        else:
            # Along another dim, which is the same rows.
            whole = [shoal.all_gather(rows.T, dim=1).T for rows in (left, right)]
            loss = contrast(*whole, torch.arange(total)) + contrast(*reversed(whole), torch.arange(total))
        (loss / 2 * (len(a) / total)).backward()
        assert shoal.all_gather(torch.tensor([start])).tolist() == [sum(counts[:rank]) for rank in range(world.size)]
    grads = [channel.all_reduce_(parameter.grad.contiguous()) for parameter in model.parameters()]
    joined = gathering(replicas_of(Plan(dp=world.size), channel))
    with joined, pytest.raises(RunError, match="another shape or type on replica"):
        shoal.all_gather(torch.zeros(2, 1 + world.rank))
    with pytest.raises(RunError, match="outside of a training step"):
        shoal.all_gather(torch.zeros(2))
    mesh.close()
    return grads


def both_forms(world, counts):
    return [gradients_on_ranks(world, counts, form) for form in ("own rows", "all rows")]


@pytest.mark.parametrize("counts", [[4, 4], [3, 1, 2]], ids=str)
def test_gradients_are_those_of_one_process(counts):
    wanted = one_process(sum(counts))
    for answer in run_on_ranks(both_forms, len(counts), counts):
        for found in answer:
            for one, other in zip(found, wanted, strict=True):
                assert torch.dist(one, other) <= 1e-12 * other.norm()


def test_one_process_gets_its_own_tensor():
    rows = torch.zeros(3, 2)
    assert shoal.all_gather(rows) is rows
    with gathering(ALONE):
        assert shoal.all_gather(rows) is rows


def test_what_cannot_be_joined_is_refused_with_the_reason():
    assert why_not_joined(Plan(dp=4, zero=3, tp=2, recompute="full")) is None
    for text, reason in {
        "dp=2 microbatches=4": "not the mean of the losses of 4 microbatches",
        "pp=2 microbatches=1": "use dp, with zero=3",
        "dp=1 cp=2": "use dp or tp",
        "ps=1 workers=2 update=bsp": "use dp in the place of ps",
    }.items():
        assert reason in why_not_joined(Plan.parse(text))
    with gathering(Replicas(refusal="no")), pytest.raises(Refusal, match="no"):
        shoal.all_gather(torch.zeros(1))
    with pytest.raises(RequestError, match="dim=1"):
        shoal.all_gather(torch.zeros(3), dim=1)


def test_a_replica_without_a_sample_is_named_and_not_waited_for():
    class Two:
        size = 2

    found = refuse_empty(Replicas(channel=Two()), num_samples=1)
    assert "1 samples for 2 replicas" in found.refusal
    assert refuse_empty(Replicas(channel=Two()), num_samples=2).refusal is None


def test_a_contrastive_model_is_proven_and_its_bugs_are_caught():
    """Under dp and ZeRO, with equal and unequal parts; plans that would be another loss are refused before anything starts."""
    recipe = own_recipe(MUTANTS[GATHERED[0]])
    # The second step has what is left of an epoch.
    uneven = read_recipe(recipe, ["data.samples=15", "data.validation=0", "data.test=0"])
    with Prover(steps=2) as prover:
        subject = build_subject(uneven)
        assert subject.joins_batch and subject.num_samples == 15
        for plan in ("dp=2", "dp=2 zero=3"):
            check_plan(subject, Plan.parse(plan))
            found = prover.prove(subject, Plan.parse(plan), "float64")
            assert found.ok and found.prediction.ok is not False, found
        for name in GATHERED:
            caught = try_mutant(prover, MUTANTS[name], recipe, {})
            assert caught.caught and caught.control_ok, caught
    for plan in ("dp=2 microbatches=2", "dp=1 pp=2", "dp=1 cp=2"):
        with pytest.raises(RequestError):
            check_plan(subject, Plan.parse(plan))
