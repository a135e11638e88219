"""The cnn on 8x8 images."""

import torch

from shoal.models.cnn import Cnn
from shoal.models.config import CnnConfig

torch.set_num_threads(1)


def test_shapes_with_and_without_a_channel() -> None:
    model = Cnn(CnnConfig(), image=(1, 8, 8), outputs=10).eval()
    images = torch.randn(3, 1, 8, 8)
    assert model(images).shape == (3, 10)
    assert torch.equal(model(images), model(images.squeeze(1)))


def test_an_image_that_four_does_not_divide_and_the_smallest() -> None:
    assert Cnn(CnnConfig(), image=(3, 11, 9), outputs=2)(torch.randn(2, 3, 11, 9)).shape == (2, 2)
    assert Cnn(CnnConfig(), image=(1, 4, 4), outputs=2)(torch.randn(2, 1, 4, 4)).shape == (2, 2)


def test_its_parts_are_those_it_says() -> None:
    kinds = [type(module).__name__ for module in Cnn(CnnConfig(), image=(1, 8, 8), outputs=10).children()]
    assert kinds == ["Conv2d", "BatchNorm2d", "Conv2d", "BatchNorm2d", "Dropout", "Linear", "Dropout", "Linear"]


def test_training_moves_the_running_statistics_and_evaluation_does_not() -> None:
    model = Cnn(CnnConfig(), image=(1, 8, 8), outputs=10)
    model.eval()
    model(torch.randn(4, 1, 8, 8))
    assert model.norm1.num_batches_tracked == 0
    model.train()
    model(torch.randn(4, 1, 8, 8))
    assert model.norm1.num_batches_tracked == 1
