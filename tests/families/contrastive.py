"""A CLIP of one's own: two towers, and a loss in which every image must find its text among all of the global batch."""

import torch
import torch.nn.functional as F
from torch import nn

import shoal
from families.data import SEQUENCE, VOCAB


class Clip(nn.Module):
    """Radford et al. 2021, small: a tower of convolutions, one of attention, and the temperature of their products."""

    def __init__(self, width=16):
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.ReLU(), nn.Flatten(), nn.Linear(128, width))
        self.embed = nn.Embedding(VOCAB, width)
        self.positions = nn.Parameter(0.02 * torch.randn(SEQUENCE, width))
        self.text = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, image, text):
        words = self.text(self.embed(text) + self.positions).mean(1)
        return F.normalize(self.image(image), dim=-1), F.normalize(words, dim=-1), self.scale.exp()


def clip():
    return Clip()


def over_global_batch(output, targets):
    """Both ways round, over the images and texts of all replicas."""
    images, texts = shoal.all_gather(output[0]), shoal.all_gather(output[1])
    scores = output[2] * images @ texts.T
    own = torch.arange(len(scores))
    return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2
