"""Norms of whole tensors from parts, put together here by hand: each rank's entries are added as a mesh would add them."""

import pytest
import torch
from torch import nn

from shoal.comm.full_tensor import take_local
from shoal.comm.mesh import pretend_mesh
from shoal.core.placement import Patch, Placement
from shoal.core.plan import Plan
from shoal.optim.norms import whole_norms
from shoal.parallel.gradnorm import build_norms, global_norm


class Model(nn.Module):
    """A fused matrix, one cut along its columns, a padded vocabulary and two tensors that stay whole."""

    def __init__(self):
        super().__init__()
        self.fused = nn.Parameter(torch.empty(6, 5))
        self.narrow = nn.Parameter(torch.empty(7, 2))
        self.vocabulary = nn.Parameter(torch.empty(4, 3))
        self.norm = nn.Parameter(torch.empty(5))
        self.gain = nn.Parameter(torch.empty(()))


WHOLES = {"fused": (12, 5), "narrow": (7, 4), "vocabulary": (7, 3), "norm": (5,), "gain": ()}


def placements(rank):
    """Two tensor-parallel ranks: three stacked matrices of four rows, four columns, and seven words padded to eight."""
    fused = tuple(
        Patch(local_start=(2 * part, 0), whole_start=(4 * part + 2 * rank, 0), shape=(2, 5)) for part in range(3)
    )
    narrow = Patch(local_start=(0, 0), whole_start=(0, 2 * rank), shape=(7, 2))
    words = Patch(local_start=(0, 0), whole_start=(4 * rank, 0), shape=(4 - rank, 3))
    return {
        "fused": Placement(whole_shape=(12, 5), local_shape=(6, 5), patches=fused),
        "narrow": Placement(whole_shape=(7, 4), local_shape=(7, 2), patches=(narrow,)),
        "vocabulary": Placement(whole_shape=(7, 3), local_shape=(4, 3), patches=(words,)),
    }


class Noting:
    """Stands for the sum over ranks: notes what a rank enters, then gives back the sum of all."""

    def __init__(self, total=None):
        self.total = total
        self.entered = None

    def __call__(self, entries):
        self.entered = entries.clone()
        return entries if self.total is None else entries.copy_(self.total)


def norms_of(rank, sum_):
    norms = build_norms(
        Model(), mesh=pretend_mesh(Plan(dp=1, tp=2), rank), placements=placements(rank), updated={}, is_sharded=False
    )
    norms._sum_ = sum_
    return norms


def parts(wholes, rank):
    local = {
        name: take_local(whole, placements(rank)[name]) for name, whole in wholes.items() if name in placements(rank)
    }
    # What lies in the padding must not matter.
    if rank == 1:
        local["vocabulary"][3:] = 1e6
    return {name: local.get(name, whole) for name, whole in wholes.items()}


@pytest.fixture
def wholes():
    generator = torch.Generator().manual_seed(4)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in WHOLES.items()}


@pytest.mark.parametrize("exact", [True, False])
def test_the_norm_of_cut_tensors_is_that_of_the_whole_ones(wholes, exact):
    entered = []
    for rank in range(2):
        noting = Noting()
        global_norm(parts(wholes, rank).items(), exact=exact, norms=norms_of(rank, noting))
        entered.append(noting.entered)
    for rank in range(2):
        found = global_norm(
            parts(wholes, rank).items(), exact=exact, norms=norms_of(rank, Noting(entered[0] + entered[1]))
        )
        assert found == pytest.approx(global_norm(wholes.items(), exact=True), rel=1e-14)


def test_trust_ratios_see_whole_tensors_in_the_order_that_was_asked(wholes):
    names = ["vocabulary", "fused", "narrow"]
    entered = []
    for rank in range(2):
        noting = Noting()
        norms_of(rank, noting)(names, [parts(wholes, rank)[name] for name in names])
        entered.append(noting.entered)
    found = norms_of(1, Noting(entered[0] + entered[1]))(names, [parts(wholes, 1)[name] for name in names])
    torch.testing.assert_close(found, whole_norms([wholes[name] for name in names]), rtol=1e-14, atol=0)


def test_a_rank_that_has_nothing_still_takes_part(wholes):
    noting = Noting()
    norms = norms_of(1, noting)
    assert norms([], []).shape == (0,)
    assert noting.entered.shape == (sum(shape[0] if shape else 1 for shape in WHOLES.values()),)
    assert norms.global_norm([], [], exact=False) == 0.0
