"""L-BFGS over shards walks the path of ``torch.optim.LBFGS``, and another coordinator can take over at any moment."""

import asyncio
import itertools
import json

import pytest
import torch

from shoal.core.errors import RequestError, RunError
from shoal.paramserver.lbfgs.algorithm import LbfgsSettings, Memory, begin, iterate, resume
from shoal.paramserver.programs import GRADIENT
from support.paramserver.lbfgs_problems import Problem, logistic, ridge, rugged, walk, walk_with_torch

CASES = {"ridge": ridge, "logistic": logistic}
NUM_ITERATIONS = 14


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4])
@pytest.mark.parametrize("history", [1, 3, 10])
@pytest.mark.parametrize("line_search", ["strong_wolfe", "fixed"])
@pytest.mark.parametrize("case", CASES)
def test_every_iterate_is_that_of_torch(case, line_search, history, num_shards):
    objective, start = CASES[case]()
    lr = 1.0 if line_search == "strong_wolfe" else 0.3
    settings = LbfgsSettings(lr=lr, history=history, line_search=line_search)
    ours, memories = walk(Problem(objective, start, num_shards), settings, NUM_ITERATIONS)
    name = "strong_wolfe" if line_search == "strong_wolfe" else None
    theirs = walk_with_torch(objective, start, NUM_ITERATIONS, lr=lr, history_size=history, line_search_fn=name)
    for iteration, (mine, torchs) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.linalg.vector_norm(mine - torchs) <= 1e-6 * torch.linalg.vector_norm(torchs), iteration
    assert len(memories[-1].pairs) <= history
    assert memories[-1].loss < memories[0].loss


@pytest.mark.parametrize("lr", [0.001, 0.1, 1.0, 40.0])
@pytest.mark.parametrize("seed", range(6))
def test_a_rugged_path_is_that_of_torch_too(seed, lr):
    """Long first steps make it narrow and short ones widen, over and over; rounding grows, so only the beginning counts."""
    objective, start = rugged(seed)
    ours, _ = walk(Problem(objective, start, 2), LbfgsSettings(lr=lr), 5)
    theirs = walk_with_torch(objective, start, 5, lr=lr, history_size=10, line_search_fn="strong_wolfe")
    for iteration, (mine, torchs) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.allclose(mine, torchs, rtol=1e-6, atol=1e-6), iteration


def test_a_ridge_reaches_its_minimiser():
    objective, start = ridge()
    problem = Problem(objective, start, 3)
    _, memories = walk(problem, LbfgsSettings(tolerance_gradient=1e-6, tolerance_change=1e-14), 80)
    weights = problem.weights.requires_grad_()
    (gradient,) = torch.autograd.grad(objective(weights), weights)
    assert gradient.abs().max() <= 1e-6
    assert memories[-1].stopped is not None
    assert memories[-1].evaluations == problem.num_evaluations


def test_what_is_over_is_not_continued():
    objective, start = ridge()
    problem = Problem(objective, start, 2)
    settings = LbfgsSettings(tolerance_gradient=1e6)
    _, memories = walk(problem, settings, 1)
    assert memories[0].stopped is not None and memories[1] == memories[0]
    assert torch.equal(problem.weights, start)


@pytest.mark.parametrize("line_search", ["strong_wolfe", "fixed"])
def test_no_vector_is_left_behind(line_search):
    objective, start = logistic()
    problem = Problem(objective, start, 2)
    settings = LbfgsSettings(history=3, line_search=line_search, lr=0.5)
    walk(problem, settings, 8)
    left = {name for name in problem.shards[0].names if not name.startswith(("step-", "change-"))}
    assert left == {"weights", "gradient", "direction", "previous", "start-7"}
    assert len(problem.shards[0].names - left) == 2 * (3 + 1)


class Crash(Exception):
    pass


class Fragile:
    """Vectors whose coordinator dies at one call: before it, or after some of the shards ran the program."""

    def __init__(self, problem: Problem, at: int, num_shards_reached: int) -> None:
        self.problem, self.at, self.reached = problem, at, num_shards_reached
        self.calls = 0

    async def run(self, program):
        self.calls += 1
        if self.calls == self.at:
            for shard in self.problem.shards[: self.reached]:
                shard.run(shard.number + 1, program)
            raise Crash
        return await self.problem.vectors.run(program)

    async def evaluate(self):
        self.calls += 1
        if self.calls == self.at:
            raise Crash
        return await self.problem.evaluate()


@pytest.mark.parametrize("num_shards_reached", [0, 1, 3])
def test_a_coordinator_that_dies_anywhere_is_replaced(num_shards_reached):
    """The memory of the last whole iteration is all that the next coordinator has; the path stays the same to the bit."""
    objective, start = logistic()
    settings = LbfgsSettings(history=2)
    undisturbed, _ = walk(Problem(objective, start, 3), settings, 5)

    async def run(at: int) -> bool:
        problem = Problem(objective, start, 3)
        vectors = Fragile(problem, at, num_shards_reached)
        memory = await begin(problem.vectors, settings)
        has_crashed = False
        while memory.iteration < 5:
            try:
                memory = await iterate(vectors, memory, settings)
            except Crash:
                has_crashed = True
                for shard in problem.shards:
                    shard.expect(0)
                problem.vectors._number = -1
                # What the dead one knew is gone, and so is the gradient of whatever it was trying.
                problem.shards[0][GRADIENT].fill_(7.0)
                known = Memory.from_values(json.loads(json.dumps(memory.as_values())), origin="a message")
                memory = await resume(problem.vectors, known, settings)
            assert torch.equal(problem.weights, undisturbed[memory.iteration])
        return has_crashed

    at = 1
    while asyncio.run(run(at)):
        at += 1
    assert at > 30


def test_a_fixed_step_into_the_void_is_refused_and_undone():
    start = torch.full((4,), 0.1, dtype=torch.float64)
    problem = Problem(lambda weights: -torch.log(weights).sum() + 100 * (weights**2).sum(), start, 2)
    with pytest.raises(RunError, match=r"a fixed step of .* use a smaller lr"):
        walk(problem, LbfgsSettings(line_search="fixed", lr=5.0), 4)
    assert torch.equal(problem.weights, start)


def test_a_line_search_comes_back_from_the_void():
    """The logarithm is not a number below zero, where the first trial lands: it counts as too far."""
    start = torch.full((4,), 0.1, dtype=torch.float64)
    problem = Problem(lambda weights: -torch.log(weights).sum() + 100 * (weights**2).sum(), start, 2)
    _, memories = walk(problem, LbfgsSettings(lr=50.0), 12)
    assert torch.allclose(problem.weights, torch.full((4,), 200**-0.5, dtype=torch.float64), atol=1e-6)
    assert all(later.loss <= earlier.loss for earlier, later in itertools.pairwise(memories))


def test_a_start_that_is_not_finite_is_refused():
    problem = Problem(lambda weights: torch.log(weights).sum(), -torch.ones(3, dtype=torch.float64), 1)
    with pytest.raises(RunError, match="the loss is nan"):
        walk(problem, LbfgsSettings(), 1)


@pytest.mark.parametrize("wrong", [{"lr": 0.0}, {"history": 0}, {"max_trials": 0}])
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(RequestError):
        LbfgsSettings(**wrong)


@pytest.mark.parametrize(
    "change", [{"pairs": [{"slot": 0}]}, {"loss": float("nan")}, {"scaling": 0.0}, {"extra": 1}, {"iteration": -1}]
)
def test_a_torn_memory_is_refused(change):
    values = {**Memory(loss=1.0).as_values(), **change}
    with pytest.raises(RunError, match="somewhere"):
        Memory.from_values(values, origin="somewhere")
