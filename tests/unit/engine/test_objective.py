"""The loss of a microbatch: which targets a rank scores, what they weigh, and whose label is no class of the model."""

import numpy as np
import pytest
import torch
from torch import nn

from shoal.comm.mesh import pretend_mesh
from shoal.core.errors import RunError
from shoal.core.plan import Plan
from shoal.data.loading.loader import Microbatch
from shoal.engine.objective import Objective, Scoring
from shoal.models.losses import cross_entropy
from shoal.optim.precision import Precision
from shoal.parallel.apply import ModelLayout
from shoal.parallel.context.apply import ContextLayout
from shoal.parallel.context.positions import Positions

TARGETS = torch.tensor([[0, 1, 2, 3, -100, 5, 6, 7]])


def scoring(rank):
    where = Positions(kind="ring", rank=rank, degree=2)
    laid = ModelLayout(context=ContextLayout(where=where, keeps_local=True))
    return Scoring(cross_entropy, layout=laid, mesh=pretend_mesh(Plan(dp=1, cp=2), rank))


def test_the_parts_of_a_sequence_weigh_what_counts_in_them():
    parts = [scoring(rank).own_part(TARGETS, 7.0) for rank in range(2)]
    assert [part[0].tolist() for part in parts] == [[[0, 1, 6, 7]], [[2, 3, -100, 5]]]
    assert [part[1] for part in parts] == [4.0, 3.0]


def test_a_microbatch_that_counts_for_nothing_weighs_nothing_in_every_part():
    """It keeps a replica without samples in step with the others under zero=3; with cp its share was divided by zero."""
    assert [scoring(rank).own_part(TARGETS, 0.0)[1] for rank in range(2)] == [0.0, 0.0]


@pytest.mark.parametrize("positions", [(), (2,)])
def test_the_sample_with_a_label_that_is_no_class_is_named(positions: tuple[int, ...]) -> None:
    targets = torch.zeros((4, *positions), dtype=torch.int64)
    targets[1], targets[2] = -100, 7
    objective = Objective(
        nn.Identity(),
        Scoring(nn.functional.cross_entropy),
        precision=Precision.named("float32"),
        device=torch.device("cpu"),
    )
    objective.name_sample = "sample {} of the dataset".format
    inputs = (torch.zeros(4, 3, *positions, requires_grad=True),)
    microbatch = Microbatch(inputs=inputs, targets=targets, sample_ids=np.array([5, 6, 70, 8]), weight=4.0)
    with pytest.raises(RunError, match="sample 70 of the dataset has the label 7 and the model 3 classes, 0 to 2"):
        objective(microbatch, 1.0)
