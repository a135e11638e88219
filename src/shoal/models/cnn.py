"""A small image classifier: two convolution-pool stages with batch norm, dropout, two linear layers. Works on 8x8 digits."""

import torch.nn.functional as F
from torch import Tensor, nn

from shoal.models.config import CnnConfig


class Cnn(nn.Module):
    """Images (B, channels, height, width), or (B, height, width) for one channel, in; scores (B, outputs) out."""

    def __init__(self, config: CnnConfig, *, image: tuple[int, int, int], outputs: int) -> None:
        super().__init__()
        channels, height, width = image
        first, second = config.channels
        self.image = image
        # No bias: the norm that follows subtracts it.
        self.conv1 = nn.Conv2d(channels, first, kernel_size=3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(first)
        self.conv2 = nn.Conv2d(first, second, kernel_size=3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(second)
        self.dropout1 = nn.Dropout(config.dropout)
        self.linear1 = nn.Linear(second * (height // 4) * (width // 4), config.hidden)
        self.dropout2 = nn.Dropout(config.dropout)
        self.linear2 = nn.Linear(config.hidden, outputs)

    def forward(self, images: Tensor) -> Tensor:
        """A score per class, or the predicted numbers."""
        x = images.reshape(-1, *self.image)
        if not x.is_floating_point():  # Pixels may come as whole numbers.
            x = x.float()
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.norm2(self.conv2(x))), 2)
        x = self.dropout1(x).flatten(1)
        x = self.dropout2(F.relu(self.linear1(x)))
        scores: Tensor = self.linear2(x)
        return scores
