"""Gradients of replicas under DDP are their sum in the order of ranks, through shared memory; what crossed is counted."""

import pytest
import torch
from torch import nn

import shoal.parallel.data as data_parallel
from shoal.comm.mesh import build_mesh
from shoal.comm.trafficcounter import Traffic
from shoal.core.plan import Plan
from shoal.parallel.data import apply_data_parallel
from shoal.testing.ranks import run_on_ranks


def model_and_loss(rank):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 5))
    torch.manual_seed(2 + rank)
    return model, torch.randn(4 + rank, 33)


def gradients_of(model, wrapped, inputs):
    wrapped(inputs).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def sum_on_rank(world, shared, is_broken):
    mesh = build_mesh(world, Plan(dp=world.size), shared=shared)
    model, inputs = model_and_loss(world.rank)
    if is_broken:
        mesh.replicas.transport.all_reduce_ = lambda tensor: None
    wrapped = apply_data_parallel(model, mesh=mesh, device=torch.device("cpu"), unused_parameters=False)
    with mesh.traffic.counting() as counts:
        found = gradients_of(model, wrapped, inputs)
    traffic = counts.get(("replicas", "all_reduce"), Traffic())
    mesh.close()
    return [found, traffic.num_bytes, len(counts)]


def reference(num_ranks):
    torch.set_num_threads(1)  # as the ranks: another number of threads gives other bits
    parts = []
    for rank in range(num_ranks):
        model, inputs = model_and_loss(rank)
        parts.append(gradients_of(model, model, inputs))
    totals = parts[0]
    for part in parts[1:]:
        totals = [total + gradient for total, gradient in zip(totals, part, strict=True)]
    return totals


def is_equal(found, wanted):
    return all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))


@pytest.mark.parametrize(("num_ranks", "shared"), [(3, True), (2, False)])
def test_gradients_are_the_sum_in_the_order_of_ranks(num_ranks, shared):
    wanted = reference(num_ranks)
    num_bytes = sum(gradient.nbytes for gradient in wanted)
    for found, crossed, num_entries in run_on_ranks(sum_on_rank, num_ranks, shared, False, deadline_seconds=100.0):
        assert is_equal(found, wanted)
        assert crossed == num_bytes and num_entries == 1


def test_a_reduction_that_is_left_out_is_seen():
    assert not is_equal(run_on_ranks(sum_on_rank, 2, True, True, deadline_seconds=100.0)[0][0], reference(2))


def test_the_seam_for_planted_bugs_is_there():
    assert callable(data_parallel._sum_bucket)
