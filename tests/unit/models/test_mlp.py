"""The mlp: its layers and its shapes."""

import torch
from torch import nn

from shoal.models.config import MlpConfig
from shoal.models.mlp import Mlp

torch.set_num_threads(1)


def test_it_takes_features_of_any_shape() -> None:
    model = Mlp(MlpConfig(layers=3, hidden=7), features=(2, 3), outputs=4)
    assert model(torch.randn(5, 2, 3)).shape == (5, 4)
    assert [layer.linear.in_features for layer in model.layers] == [6, 7, 7]


def test_batch_norm_and_dropout_are_there_when_asked_for() -> None:
    plain = Mlp(MlpConfig(), features=(4,), outputs=1)
    full = Mlp(MlpConfig(batch_norm=True, dropout=0.5), features=(4,), outputs=1)
    assert not any(isinstance(module, nn.BatchNorm1d) for module in plain.modules())
    assert sum(isinstance(module, nn.BatchNorm1d) for module in full.modules()) == 2
    assert {module.p for module in full.modules() if isinstance(module, nn.Dropout)} == {0.5}


def test_whole_numbers_are_taken_as_numbers() -> None:
    model = Mlp(MlpConfig(), features=(3,), outputs=2)
    rows = torch.tensor([[1, 2, 3], [40, 5, 6]])
    assert torch.equal(model(rows), model(rows.float()))
