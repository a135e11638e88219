"""Modules of one's own that recipes of tests name as ``support.models.custom_parts:function``."""

import math
import os

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake
from torch.utils.data import TensorDataset


def build_logistic(spec):
    """Logistic regression, with weights that are drawn and not zero."""
    features = 1
    for size in spec.features:
        features *= size
    return nn.Sequential(nn.Flatten(), nn.Linear(features, spec.classes))


class Recurrent(nn.Module):
    """Tokens through a recurrent layer of torch's."""

    def __init__(self, kind, vocab):
        super().__init__()
        self.embed = nn.Embedding(vocab, 16)
        self.layer = getattr(nn, kind)(16, 24, batch_first=True)
        self.out = nn.Linear(24, vocab)

    def forward(self, tokens):
        return self.out(self.layer(self.embed(tokens))[0])


def build_recurrent(spec, kind="LSTM"):
    return Recurrent(kind, spec.vocab)


class Centre(nn.Module):
    """One point, put out for every sample: under the squared error its best place is the mean of the targets."""

    def __init__(self, size):
        super().__init__()
        self.point = nn.Parameter(torch.zeros(size))

    def forward(self, inputs):
        return self.point.expand(len(inputs), -1)


def build_centre(spec):
    return Centre(3)


def build_points(num_samples=16):
    """Targets in two far groups, so that samples pull in different directions."""
    generator = torch.Generator().manual_seed(4)
    targets = torch.randn(num_samples, 3, generator=generator)
    targets[::2] += torch.tensor([4.0, -2.0, 1.0])
    inputs = torch.zeros(num_samples, 1)
    return {"train": TensorDataset(inputs, targets), "validation": TensorDataset(inputs, targets)}


class Bag(nn.Module):
    """An embedding of many words of which a batch has few, and a layer on the mean of them."""

    def __init__(self, num_words, *, sparse=False):
        super().__init__()
        self.embed = nn.Embedding(num_words, 16, sparse=sparse)
        self.out = nn.Linear(16, 4)

    def forward(self, words):
        return self.out(self.embed(words).mean(1))


def build_bag(spec, num_words=2000):
    return Bag(num_words)


def build_rows(spec, num_words=2000):
    """The same, with gradients that come as rows."""
    return Bag(num_words, sparse=True)


class CalledRows(Bag):
    """The same by a call in its forward, of which no module tells."""

    def forward(self, words):
        return self.out(nn.functional.embedding(words, self.embed.weight, sparse=True).mean(1))


def build_called_rows(spec, num_words=2000):
    return CalledRows(num_words)


def build_words(num_samples=64, num_words=2000):
    generator = torch.Generator().manual_seed(4)
    words = torch.randint(0, num_words, (num_samples, 3), generator=generator)
    data = TensorDataset(words, words[:, 0] % 4)
    return {"train": data, "validation": data}


class BiasedAttention(nn.Module):
    """Attention as BERT and ViT have it, with a bias on the keys: softmax takes it off again, so its true gradient is zero."""

    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(hidden)
        self.query, self.key, self.value, self.out = (nn.Linear(hidden, hidden) for _ in range(4))
        for linear in (self.query, self.key, self.value, self.out):
            nn.init.zeros_(linear.bias)

    def forward(self, x):
        kept, x = x, self.norm(x)
        q, k, v = (
            linear(x).unflatten(-1, (-1, x.shape[-1] // self.heads)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return kept + self.out(mixed.transpose(1, 2).flatten(2))


def build_biased_attention(spec, hidden=16, heads=4, layers=2):
    blocks = nn.ModuleList(BiasedAttention(hidden, heads) for _ in range(layers))
    return nn.Sequential(nn.Embedding(spec.vocab, hidden), *blocks, nn.Linear(hidden, spec.vocab))


class Strange(nn.Module):
    """One layer that is what a test asks for: it keeps more than it foretells, or breaks where there are two processes."""

    def __init__(self, features, classes, *, keeps_more, breaks):
        super().__init__()
        self.linear = nn.Linear(features, classes)
        self.keeps_more, self.breaks = keeps_more, breaks

    def forward(self, x):
        if self.breaks and os.environ.get("WORLD_SIZE") == "2":
            raise ValueError("this model cannot do with two processes")
        y = self.linear(x.flatten(1))
        # Costs are predicted by tensors without data, for which this takes a shorter way.
        if self.keeps_more and not is_fake(x):
            for _ in range(8):
                y = y.exp().log()
        return y


def build_strange(spec, keeps_more=False, breaks=False):
    return Strange(math.prod(spec.features), spec.classes, keeps_more=keeps_more, breaks=breaks)


class Loser(nn.Module):
    """Has no gradient of one parameter, in several processes or everywhere."""

    def __init__(self, features, classes, everywhere):
        super().__init__()
        self.inner, self.scale = nn.Linear(features, classes), nn.Parameter(torch.ones(classes))
        self.loses = everywhere or int(os.environ.get("WORLD_SIZE", "1")) > 1

    def forward(self, x):
        return self.inner(x) * (self.scale.detach() if self.loses else self.scale)


def build_loser(spec, everywhere=False):
    return Loser(math.prod(spec.features), spec.classes, everywhere)
