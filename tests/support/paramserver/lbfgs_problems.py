"""Convex problems in float64 for L-BFGS, cut over any number of shards."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import torch
from torch import Tensor

from shoal.paramserver.lbfgs.algorithm import LbfgsSettings, Memory, begin, iterate
from shoal.paramserver.lbfgs.vectors import ShardVectors
from shoal.paramserver.programs import GRADIENT, WEIGHTS, Program, merge_measures

Objective = Callable[[Tensor], Tensor]


def ridge(num_features: int = 12) -> tuple[Objective, Tensor]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(40, num_features, generator=generator, dtype=torch.float64) * torch.linspace(
        0.3, 3, num_features
    )
    targets = torch.randn(40, generator=generator, dtype=torch.float64)
    start = torch.randn(num_features, generator=generator, dtype=torch.float64)
    return lambda weights: ((inputs @ weights - targets) ** 2).sum() / 40 + 0.05 * (weights**2).sum(), start


def logistic(num_features: int = 9) -> tuple[Objective, Tensor]:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(60, num_features, generator=generator, dtype=torch.float64) * 2
    labels = (inputs[:, 0] - inputs[:, 1] + torch.randn(60, generator=generator) > 0).to(torch.float64)
    start = torch.randn(num_features, generator=generator, dtype=torch.float64)

    def objective(weights: Tensor) -> Tensor:
        entropy = torch.nn.functional.binary_cross_entropy_with_logits(inputs @ weights, labels)
        return entropy + 0.01 * (weights**2).sum()

    return objective, start


def rugged(seed: int) -> tuple[Objective, Tensor]:
    """Curved valleys and waves: not convex, so that a line search has to widen, narrow and turn round."""
    start = torch.randn(6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2

    def objective(weights: Tensor) -> Tensor:
        valley = (10 * (weights[1:] - weights[:-1] ** 2) ** 2 + (1 - weights[:-1]) ** 2).sum()
        return valley + 3 * torch.sin(4 * weights).sum() + 0.1 * (weights**4).sum()

    return objective, start


class LocalVectors:
    """Vectors whose shards are all in this process."""

    def __init__(self, shards: Sequence[ShardVectors], evaluate: Callable[[], Awaitable[float]]) -> None:
        """Take the shards, in order, and what evaluates the objective and puts its gradient into them."""
        self._shards = tuple(shards)
        self._evaluate = evaluate
        self._number = max(shard.number for shard in shards)

    async def run(self, program: Program) -> tuple[float, ...]:
        """Run a program on every shard."""
        self._number += 1
        return merge_measures(program, [shard.run(self._number, program) for shard in self._shards])

    async def evaluate(self) -> float:
        """The objective at ``weights``."""
        return await self._evaluate()


class Problem:
    """An objective whose weights and gradients lie in shards."""

    def __init__(self, objective: Objective, start: Tensor, num_shards: int) -> None:
        self.objective = objective
        self.shards = [ShardVectors(part.clone()) for part in start.tensor_split(num_shards)]
        self.vectors = LocalVectors(self.shards, self.evaluate)
        self.num_evaluations = 0

    @property
    def weights(self) -> Tensor:
        return torch.cat([shard[WEIGHTS] for shard in self.shards])

    async def evaluate(self) -> float:
        self.num_evaluations += 1
        weights = self.weights.requires_grad_()
        loss = self.objective(weights)
        (gradient,) = torch.autograd.grad(loss, weights)
        offset = 0
        for shard in self.shards:
            size = shard[WEIGHTS].numel()
            shard.put(GRADIENT, gradient[offset : offset + size])
            offset += size
        return float(loss.detach())


def walk(problem: Problem, settings: LbfgsSettings, num_iterations: int) -> tuple[list[Tensor], list[Memory]]:
    async def run() -> tuple[list[Tensor], list[Memory]]:
        memories = [await begin(problem.vectors, settings)]
        weights = [problem.weights]
        for _ in range(num_iterations):
            memories.append(await iterate(problem.vectors, memories[-1], settings))
            weights.append(problem.weights)
        return weights, memories

    return asyncio.run(run())


def walk_with_torch(objective: Objective, start: Tensor, num_iterations: int, **settings: object) -> list[Tensor]:
    """Where ``torch.optim.LBFGS`` is after 1, 2, ... iterations: a fresh run for each, since a step is all its iterations."""
    found = [start.clone()]
    for count in range(1, num_iterations + 1):
        weights = start.clone().requires_grad_()
        optimizer = torch.optim.LBFGS([weights], max_iter=count, max_eval=10_000, **settings)

        def closure(weights=weights, optimizer=optimizer):
            optimizer.zero_grad()
            loss = objective(weights)
            loss.backward()
            return loss.detach()

        optimizer.step(closure)
        found.append(weights.detach())
    return found
