"""A label that is none of the model's classes: the loss's own error said neither whose it is nor how many classes there are."""

import numpy as np
import pytest
import torch
from torch import nn

from shoal.core.errors import RunError
from shoal.data.loader import Microbatch
from shoal.optim.precision import Precision
from shoal.trainer.objective import Objective
from shoal.trainer.scoring import Scoring


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
