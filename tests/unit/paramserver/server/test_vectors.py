"""Gradients of work units of a batch that are not finite: a worker's fault is refused, the line search's is let through to it."""

import asyncio
from types import SimpleNamespace

import torch
from torch import nn

from shoal.optim.build import decide_groups
from shoal.optim.config import OptimConfig
from shoal.paramserver.messages import Part
from shoal.paramserver.programs import Program
from shoal.paramserver.server.replica import Replica
from shoal.paramserver.server.vectors import LbfgsShard, VectorServer
from shoal.paramserver.sharding import TensorSpec, cut_model

MODEL = {"weight": TensorSpec((4, 3), "float32"), "bias": TensorSpec((4,), "float32")}
WORKERS = ("one", "two")


class Asked:
    """In the place of a request: says what became of it."""

    def __init__(self, sender, gradient):
        self.sender, self.payload = sender, memoryview(gradient.numpy()).cast("B")
        self.header = SimpleNamespace(dtype="float32")
        self.outcome = None

    async def answer(self, body, payload=None):
        self.outcome = "taken"

    async def refuse(self, code, text):
        self.outcome = code
        self.text = text


class Desk:
    """A server with one shard, in an evaluation of two work units."""

    def __init__(self):
        shard = cut_model(MODEL, 1).shards[0]
        groups = decide_groups(OptimConfig(), nn.Linear(3, 4))
        self.state = LbfgsShard(shard, model=MODEL, groups=groups, history=2)
        self.state.run(0, Program(operations=()), is_first=True, begins=(0, 2))
        self.refused, self.mirrored = [], []
        replica = Replica(self.state)
        view = SimpleNamespace(workers=[SimpleNamespace(id=worker) for worker in WORKERS])

        async def replicate(shard, message, payload=None):
            self.mirrored.append(message)

        store = SimpleNamespace(
            require=lambda shard: replica, require_copy=lambda sender, shard: replica, replicate=replicate
        )
        self.server = VectorServer(
            store,
            SimpleNamespace(view=view),
            on_not_finite=lambda identity, reason: self.refused.append((*identity, reason)),
        )

    def bring(self, worker, unit, gradient, loss=0.5, evaluation=0, is_finite=True):
        asked = Asked(worker, gradient)
        part = Part(shard=0, evaluation=evaluation, unit=unit, loss=loss, is_finite=is_finite)
        asyncio.run(self.server.handle(asked, part))
        return asked


def poisoned():
    gradient = torch.ones(16)
    gradient[14] = float("nan")
    return gradient


def test_nan_where_the_loss_is_finite_is_refused_counted_and_told():
    """It went into the sum unseen, and spoiled every evaluation from then on without a word."""
    desk = Desk()
    assert desk.bring("one", 0, torch.ones(16)).outcome == "taken"
    refused = desk.bring("one", 1, poisoned())
    assert refused.outcome == "not-finite"
    assert "work unit 1 of evaluation 0 by worker one has NaN or infinity in the gradient of" in refused.text
    assert [one[:2] for one in desk.refused] == [("one", 1)] and len(desk.mirrored) == 1
    # Sent again, because the answer was lost.
    assert desk.bring("one", 1, poisoned()).outcome == "not-finite"
    assert desk.bring("two", 1, torch.ones(16)).outcome == "taken"
    assert torch.equal(desk.state._sum.total, torch.full((16,), 2.0))


def test_a_part_of_a_gradient_that_another_shard_refuses_is_refused_here_too():
    """It stayed in this shard's sum, and the good worker's, which came after it, was passed over as one that was there."""
    desk = Desk()
    assert desk.bring("one", 0, torch.full((16,), 1e6), is_finite=False).outcome == "not-finite"
    assert not desk.refused and not desk.mirrored, "the shard that has it counts it"
    assert desk.bring("two", 0, torch.ones(16)).outcome == desk.bring("two", 1, torch.ones(16)).outcome == "taken"
    assert torch.equal(desk.state._sum.total, torch.full((16,), 2.0))


def test_what_two_workers_find_goes_to_the_line_search():
    """Else nobody could ever compute the work unit, and the search would not learn that it went too far."""
    desk = Desk()
    assert desk.bring("one", 0, poisoned()).outcome == "not-finite"
    assert desk.bring("two", 0, poisoned()).outcome == "taken"
    desk.bring("two", 1, torch.ones(16))
    assert desk.state._sum.is_done and not torch.isfinite(desk.state._sum.total).all()
    # The next evaluation is at other weights.
    desk.state.run(1, Program(operations=()), begins=(1, 2))
    assert desk.bring("two", 0, poisoned(), evaluation=1).outcome == "not-finite"


def test_nan_of_a_loss_that_is_not_finite_is_the_search_s_own():
    desk = Desk()
    assert desk.bring("one", 0, poisoned(), loss=float("inf")).outcome == "taken"
    assert not desk.refused
