"""A GAN in a loop of one's own: two models, two optimizers, each trained against the other; and the same in plain PyTorch."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import shoal
from shoal.data.build import build_splits
from shoal.data.config import SyntheticConfig
from shoal.data.order import permute
from shoal.models.build import build_model
from shoal.models.config import GptConfig
from shoal.models.losses import cross_entropy

BATCH, STEPS, SEED, NOISE, FEATURES = 8, 4, 5, 4, 6
PLANS = ("dp=2", "dp=2 zero=3")


class Generator(nn.Module):
    """Makes samples of noise; it is scored by the critic's opinion of them (Goodfellow et al. 2014)."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(NOISE, 16), nn.ReLU(), nn.Linear(16, FEATURES))
        self.other = []  # The critic; in a list, because it is no part of this model.

    def forward(self, noise, real):
        return self.other[0].net(self.net(noise))


class Critic(nn.Module):
    """Tells real samples from made ones."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
        self.other = []

    def forward(self, noise, real):
        with torch.no_grad():
            made = self.other[0].net(noise)
        return torch.cat([self.net(real), self.net(made)], 1)


def critic_loss(scores, targets):
    return F.softplus(-scores[:, 0]).mean() + F.softplus(scores[:, 1]).mean()


def generator_loss(scores, targets):
    return F.softplus(-scores).mean()


def dataset():
    generator = torch.Generator().manual_seed(0)
    return [
        ((torch.randn(NOISE, generator=generator), torch.randn(FEATURES, generator=generator) + 1), 0.0)
        for _ in range(BATCH * STEPS)
    ]


def build():
    torch.manual_seed(SEED)
    critic, generator = Critic(), Generator()
    critic.other.append(generator)
    generator.other.append(critic)
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.5, 0.999)) for model in (critic, generator)]
    return critic, generator, *optimizers


def plain(parts):
    """Plain PyTorch, with as many partial sums of each gradient as there are replicas."""
    critic, generator, of_critic, of_generator = build()
    data = dataset()
    order = permute(SEED, 0, len(data), np.arange(len(data), dtype=np.int64))
    for start in range(0, len(data), BATCH):
        rows = [
            [torch.stack([data[i][0][side] for i in ids]) for side in (0, 1)]
            for ids in np.split(order[start : start + BATCH], parts)
        ]
        for model, optimizer, loss in ((critic, of_critic, critic_loss), (generator, of_generator, generator_loss)):
            optimizer.zero_grad()
            for row in rows:
                (loss(model(*row), None) / parts).backward()
            optimizer.step()
    return _weights(critic.state_dict(), generator.state_dict())


def own_loop(world, plan):
    """The script with ``shoal.Run``, on this rank."""
    with shoal.Run(plan=plan, seed=SEED, world=world) as run:
        critic, generator, of_critic, of_generator = build()
        loader = run.loader(dataset(), global_batch=BATCH)
        critic, of_critic = run.setup(critic, of_critic, loss=critic_loss, name="critic")
        generator, of_generator = run.setup(generator, of_generator, loss=generator_loss, name="generator")
        for batch in loader:
            run.forward_backward(batch, model=critic)
            of_critic.step()
            critic.requires_grad_(
                False
            )  # What the generator learns from is the critic's opinion, and not to change it.
            run.forward_backward(batch, model=generator)
            of_generator.step()
            critic.requires_grad_(True)
        return _weights(run.state_dict(model=critic), run.state_dict(model=generator))


def _weights(critic, generator):
    named = {"critic": critic, "generator": generator}
    return {f"{model}.{name}": one.clone() for model, state in named.items() for name, one in state.items()}


def own_loops(world):
    return {plan: own_loop(world, plan) for plan in PLANS}


def refusals(world):
    """What is said of a second model under plans that cut models or sequences."""
    data = build_splits(SyntheticConfig(kind="tokens", samples=32, sequence=8, vocab=16), 0)
    config = GptConfig(layers=2, hidden=16, heads=2)
    said = {}
    for plan in ("pp=2 microbatches=2", "cp=2"):
        with shoal.Run(plan=plan, seed=SEED, world=world) as run:
            run.loader(data, global_batch=BATCH)
            for name in ("one", "other"):
                model = build_model(config, data.spec)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                try:
                    run.setup(model, optimizer, loss=cross_entropy, name=name)
                except shoal.RequestError as refusal:
                    said[f"{plan}: {name}"] = str(refusal)
    return said
