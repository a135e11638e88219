"""Which targets a rank scores, and what they weigh."""

import torch

from shoal.comm.mesh import pretend_mesh
from shoal.core.plan import Plan
from shoal.models.losses import cross_entropy
from shoal.parallel.apply import ModelLayout
from shoal.parallel.context.apply import ContextLayout
from shoal.parallel.context.positions import Positions
from shoal.trainer.scoring import Scoring

TARGETS = torch.tensor([[0, 1, 2, 3, -100, 5, 6, 7]])


def scoring(rank):
    where = Positions(kind="ring", rank=rank, degree=2)
    laid = ModelLayout(context=ContextLayout(where=where, keeps_local=True))
    return Scoring(cross_entropy, laid=laid, mesh=pretend_mesh(Plan(dp=1, cp=2), rank))


def test_the_parts_of_a_sequence_weigh_what_counts_in_them():
    parts = [scoring(rank).own_part(TARGETS, 7.0) for rank in range(2)]
    assert [part[0].tolist() for part in parts] == [[[0, 1, 6, 7]], [[2, 3, -100, 5]]]
    assert [part[1] for part in parts] == [4.0, 3.0]


def test_a_microbatch_that_counts_for_nothing_weighs_nothing_in_every_part():
    """It keeps a replica without samples in step with the others under zero=3; with cp its share was divided by zero."""
    assert [scoring(rank).own_part(TARGETS, 0.0)[1] for rank in range(2)] == [0.0, 0.0]
