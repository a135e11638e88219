"""A GAN in a loop of one's own: two models, two optimizers, each trained against the other; and the same in plain PyTorch."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import shoal
from families.catalogue import PLANS
from shoal.data.build import build_splits
from shoal.data.config import SyntheticConfig
from shoal.data.order import permute
from shoal.models.build import build_model
from shoal.models.config import GptConfig
from shoal.models.losses import cross_entropy
from shoal.testing.ranks import run_on_ranks

BATCH, STEPS, SEED, NOISE, FEATURES = 8, 4, 5, 4, 6
PROVED = (("dp=2", "float32"), ("dp=2 zero=3", "float32"), ("tp=2", "float32"), ("tp=2", "float64"))
REFUSED = ("pp=2 microbatches=2", "cp=2")
BOUNDS = {"float32": 1e-5, "float64": 1e-12}
"""Of the relative error of a tensor, where a plan splits sums."""


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


def dataset(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [
        tuple(torch.randn(size, generator=generator).to(dtype) + shift for size, shift in ((NOISE, 0), (FEATURES, 1)))
        for _ in range(BATCH * STEPS)
    ]


def build(dtype):
    torch.manual_seed(SEED)
    critic, generator = Critic().to(dtype), Generator().to(dtype)
    critic.other.append(generator)
    generator.other.append(critic)
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.5, 0.999)) for model in (critic, generator)]
    return critic, generator, *optimizers


def plain(parts, dtype=torch.float32):
    """Plain PyTorch, with as many partial sums of each gradient as there are replicas."""
    critic, generator, of_critic, of_generator = build(dtype)
    data = dataset(dtype)
    order = permute(SEED, 0, len(data), np.arange(len(data), dtype=np.int64))
    for start in range(0, len(data), BATCH):
        rows = [
            [torch.stack([data[i][side] for i in ids]) for side in (0, 1)]
            for ids in np.split(order[start : start + BATCH], parts)
        ]
        for model, optimizer, loss in ((critic, of_critic, critic_loss), (generator, of_generator, generator_loss)):
            optimizer.zero_grad()
            for row in rows:
                (loss(model(*row), None) / parts).backward()
            optimizer.step()
    return _weights(critic.state_dict(), generator.state_dict())


def own_loop(world, plan, precision="float32"):
    """The script with ``shoal.Run``, on this rank; its weights, and how many of them this rank holds."""
    dtype = getattr(torch, precision)
    with shoal.Run(plan=plan, seed=SEED, precision=precision, world=world) as run:
        critic, generator, of_critic, of_generator = build(dtype)
        data = [(sample, 0.0) for sample in dataset(dtype)]
        loader = run.loader(data, global_batch=BATCH)
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
        held = sum(one.numel() for model in (critic, generator) for one in model.parameters())
        return _weights(run.state_dict(model=critic), run.state_dict(model=generator)), held


def _weights(critic, generator):
    named = {"critic": critic, "generator": generator}
    return {f"{model}.{name}": one.clone() for model, state in named.items() for name, one in state.items()}


def own_loops(world):
    """Weights by plan and arithmetic, or why the plan is refused."""
    found = {}
    for plan, precision in PROVED:
        found[plan, precision] = own_loop(world, plan, precision)
    for plan in REFUSED:
        found[plan] = refusal(world, plan)
    return found


def refusal(world, plan):
    """What is said of a second model under a plan that cuts models or sequences; the first could be cut."""
    data = build_splits(SyntheticConfig(kind="tokens", samples=32, sequence=8, vocab=16), 0)
    config = GptConfig(layers=2, hidden=16, heads=2)
    with shoal.Run(plan=plan, seed=SEED, world=world) as run:
        run.loader(data, global_batch=BATCH)
        for name in ("one", "other"):
            model = build_model(config, data.spec)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            try:
                run.setup(model, optimizer, loss=cross_entropy, name=name)
            except shoal.RequestError as refused:
                return name, str(refused)
    return "", ""


def prove():
    """The row of the GAN, as the sweep keeps it."""
    return judge(*run_on_ranks(own_loops, 2, deadline_seconds=120.0))


def judge(first, second):
    """What two ranks found under each plan against plain PyTorch with as many partial sums."""
    rows = {plan: [] for plan in PLANS}
    for plan, precision in PROVED:
        wanted = plain(2 if plan.startswith("dp") else 1, getattr(torch, precision))
        found = [rank[plan, precision][0] for rank in (first, second)]
        errors = [float((one[name] - wanted[name]).norm() / wanted[name].norm()) for one in found for name in wanted]
        is_bitwise = all(torch.equal(one[name], wanted[name]) for one in found for name in wanted)
        bound = 0.0 if plan.startswith("dp") else BOUNDS[precision]
        status = "proven" if (is_bitwise or max(errors) <= bound) and set(found[0]) == set(wanted) else "differs"
        row = {"status": status, "reason": "", "dtype": precision, "bitwise": is_bitwise, "worst": max(errors)}
        rows[plan].append(row)
    for plan in REFUSED:
        at, reason = first[plan]
        status = "refused" if at == "other" else "differs"
        rows[plan.partition(" ")[0]].append({"status": status, "reason": reason, "dtype": "float32"})
    return rows
