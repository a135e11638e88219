"""A shard's copy for a new backup: made beside everything else, while pushes come in."""

import asyncio
import contextlib

import torch
from torch import nn

from shoal.optim.build import decide_groups
from shoal.optim.config import OptimConfig
from shoal.paramserver.programs import WEIGHTS, Operation, Program
from shoal.paramserver.records import PushId
from shoal.paramserver.server.replica import Replica, unpack
from shoal.paramserver.server.shard import ShardState
from shoal.paramserver.server.vectors import LbfgsShard
from shoal.paramserver.sharding import TensorSpec, cut_model
from support.paramserver.updates import make_update

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
                replica.store(PushId("worker", number), memoryview(gradient.numpy()).cast("B"), 0)
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


def test_weights_that_are_read_stay_as_they_are_while_updates_go_on():
    """An update waited for the slowest reader of the shard, and a reader that had stopped held it up for its whole deadline."""

    async def run():
        replica, other = Replica(make_state()), Replica(make_state())
        reading = []
        with contextlib.ExitStack() as lent:
            for number in range(4):
                gradient = memoryview(torch.full((NUMEL,), 1.0 + number).numpy()).cast("B")
                if number < 3:
                    async with replica.lock:
                        weights = lent.enter_context(replica.read_snapshot())
                    reading.append((weights, weights.clone()))
                for one in (replica, other):
                    one.store(PushId("worker", number), gradient, number)
                    async with asyncio.timeout(20):
                        await one.apply(make_update(number, ("worker", number, 1.0)), 0.1)
            assert all(torch.equal(*pair) for pair in reading)
            assert len({weights.data_ptr() for weights, _ in reading} | {replica.state.weights.data_ptr()}) == 4
            spares = {weights.data_ptr() for weights, _ in reading}
        assert torch.equal(replica.state.weights, other.state.weights), "the update is another one in other memory"
        assert torch.equal(replica.state.parameters()["weight"].view(-1), replica.state.weights)
        return replica, spares

    async def go_on():
        replica, spares = await run()
        here = replica.state.weights.data_ptr()
        for number in (4, 5):
            replica.store(PushId("worker", number), memoryview(torch.ones(NUMEL).numpy()).cast("B"), number)
        await replica.apply(make_update(4, ("worker", 4, 1.0)), 0.1)
        assert replica.state.weights.data_ptr() == here, "nobody reads, and the weights were copied"
        async with replica.lock:
            lent = replica.read_snapshot()
            lent.__enter__()
        await replica.apply(make_update(5, ("worker", 5, 1.0)), 0.1)
        lent.__exit__(None, None, None)
        assert replica.state.weights.data_ptr() in spares, "memory that was given back is not used again"

    asyncio.run(go_on())


def test_programs_go_on_in_other_memory_while_weights_are_read():
    module = nn.Linear(1024, 512, bias=False)
    shard = LbfgsShard(
        cut_model(MODEL, 1).shards[0], model=MODEL, groups=decide_groups(OptimConfig(), module), history=2
    )
    shard.load_weights({"weight": torch.ones(512, 1024)})
    program = Program(operations=(Operation(kind="scale", onto=WEIGHTS, factor=3.0),))

    async def run():
        replica = Replica(shard)
        async with replica.lock:
            lent = replica.read_snapshot()
            weights = lent.__enter__()
        await replica.change(lambda: shard.run(0, program, is_first=True))
        assert float(weights[0]) == 1.0 and float(weights[-1]) == 1.0
        lent.__exit__(None, None, None)
        assert torch.equal(shard.weights, torch.full((NUMEL,), 3.0))
        assert torch.equal(shard.parameters()["weight"].reshape(-1), shard.weights)

    asyncio.run(run())


def test_a_push_that_does_not_fit_and_came_before_its_shard_is_let_go():
    """Nobody could check it while the shard was on its way; it was the end of the server when the shard came."""

    async def run():
        replica = Replica(None)
        good, bad = torch.ones(NUMEL), torch.ones(NUMEL)
        bad[3] = torch.nan
        pushes = (good[:-1], good[: NUMEL // 2], good, bad)
        for number, gradient in enumerate(pushes):
            replica.store(PushId("worker", number), memoryview(gradient.numpy()).cast("B"), 0)
        replica.store(PushId("worker", 9), memoryview(b"abc"), 0)
        replica.fill(make_state())
        assert replica.ready.is_set() and replica.state.num_waiting == 1, "the one that fits"

    asyncio.run(run())
