"""A shard's copy for a new backup: made beside everything else, while pushes come in."""

import asyncio

import torch
from torch import nn

from shoal.optim.build import decide_groups
from shoal.optim.config import OptimConfig
from shoal.paramserver.cutting import TensorSpec, cut_model
from shoal.paramserver.replica import Replica, unpack
from shoal.paramserver.rounds import Identity
from shoal.paramserver.shard import ShardState

MODEL = {"weight": TensorSpec((512, 1024), "float32")}
NUMEL = 512 * 1024


def make_state():
    optim = OptimConfig(name="adamw", lr=0.1)
    module = nn.Linear(1024, 512, bias=False)
    return ShardState(cut_model(MODEL, 1).shards[0], model=MODEL, optim=optim, groups=decide_groups(optim, module))


def test_while_a_shard_is_copied_others_run_and_pushes_are_taken():
    """Who copies in the event loop is silent meanwhile, and a server that is silent for long is taken for dead."""

    async def run():
        replica = Replica(make_state())
        gradient = torch.ones(NUMEL)
        pushes = iter(range(10_000))
        is_copied = False

        async def push():
            number = 0
            while not is_copied:
                number = next(pushes)
                replica.store(Identity("worker", number), memoryview(gradient.numpy()).cast("B"), 0)
                replica.state.discard(f"gone-{number}")
                await asyncio.sleep(0)
            return number

        pushing = asyncio.ensure_future(push())
        text, row = await replica.export()
        is_copied = True
        assert await pushing > 0, "nobody else ran"
        other = make_state()
        other.restore(*unpack(text, memoryview(row.numpy())))
        assert torch.equal(other.weights, replica.state.weights) and other.num_waiting <= replica.state.num_waiting

    asyncio.run(run())
