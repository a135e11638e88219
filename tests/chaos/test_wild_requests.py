"""Requests that are whole and sealed, and say nonsense: to servers and to the center of a run, beside workers that train.

``test_wire_fuzz.py`` is about frames; here every frame is right, and what is asked is drawn at random from the types of the
messages. Nobody who asks is a member. None of it may change a bit, end a process, or cost memory.
"""

import asyncio
import dataclasses
import random
import types
import typing

import msgspec
import numpy as np
import pytest
import torch

from shoal.comm.wire.errors import WireError
from shoal.comm.wire.node import Node, new_instance_id
from shoal.paramserver.messages import OPERATIONS, Dead, Halt, Join
from support.paramserver.job_in_process import alone, quicken, running_job

STEPS, SHARES = 40, 2
NUM_REQUESTS = 1500
# Whoever starts processes is no member either: these two are believed.
OPEN = (Dead, Halt)
NUMBERS = (0, 1, -1, 2, 3, 7, 255, -(2**31), 2**31, 2**40, 2**62)
FLOATS = (0.0, -1.0, 1e300, float("nan"), float("inf"), float("-inf"), 0.5)
WORDS = ("", "0", "server-0", "worker-0", "f" * 16, "ä" * 40, "../..", "finished", "[" * 50, "x" * 3000)


class Wild:
    """Draws requests."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.kinds = [OPERATIONS[name].request for name in OPERATIONS if OPERATIONS[name].request not in OPEN]

    def request(self):
        kind = self.dice.choice(self.kinds)
        return self.made(kind), self.payload(kind)

    def payload(self, kind):
        takes = OPERATIONS[next(name for name in OPERATIONS if OPERATIONS[name].request is kind)].max_payload
        if not takes or self.dice.random() < 0.2:
            return None
        dtype = self.dice.choice(["float32", "int32", "uint8", "float64", "bool"])
        return np.ones(self.dice.choice([0, 1, 3, 51, 52, 204, 5000]), dtype)

    def made(self, kind):
        fields = msgspec.structs.fields(kind) if issubclass(kind, msgspec.Struct) else dataclasses.fields(kind)
        hints = typing.get_type_hints(kind)
        return kind(**{field.name: self.drawn(hints[field.name]) for field in fields})

    def drawn(self, hint):
        dice, origin, given = self.dice, typing.get_origin(hint), typing.get_args(hint)
        if origin in (types.UnionType, typing.Union):
            return self.drawn(dice.choice(given))
        if origin is typing.Literal:
            return dice.choice(given)
        if origin is tuple and given[-1] is Ellipsis:
            return tuple(self.drawn(given[0]) for _ in range(dice.choice([0, 1, 2, 5])))
        if origin is tuple:
            return tuple(self.drawn(one) for one in given)
        if origin is dict:
            return {self.drawn(given[0]): self.drawn(given[1]) for _ in range(dice.choice([0, 1, 3]))}
        if hint is types.NoneType:
            return None
        if isinstance(hint, type) and (dataclasses.is_dataclass(hint) or issubclass(hint, msgspec.Struct)):
            return self.made(hint)
        if isinstance(hint, type) and issubclass(hint, tuple):
            return hint(*(self.drawn(one) for one in typing.get_type_hints(hint).values()))
        return {
            bool: lambda: dice.random() < 0.5,
            int: lambda: dice.choice(NUMBERS),
            float: lambda: dice.choice(FLOATS),
            str: lambda: dice.choice(WORDS),
            bytes: lambda: dice.randbytes(dice.choice([0, 5, 500])),
        }[hint]()


@pytest.fixture
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("c")


async def storm(job, seed):
    """Ask everybody, at random; how many asked were answered at all."""
    wild = Wild(seed)
    num_refused = 0
    for number in range(NUM_REQUESTS // 50):
        node = Node(instance_id=new_instance_id(), operations=OPERATIONS, arena_dir=job.folder)
        node.epoch = job.view().epoch if number % 3 else wild.dice.choice([0, 1, 2**40])
        members = [member.address for member in job.view().servers] + [job.find().address]

        async def ask(node=node, members=members):
            body, payload = wild.request()
            try:
                await node.connect(wild.dice.choice(members)).call(body, payload=payload, deadline=0.3)
            except WireError:
                return 1
            return 0

        num_refused += sum(await asyncio.gather(*(ask() for _ in range(50))))
        await node.close()
        job.check()
    return num_refused


@pytest.mark.timeout(180)
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 30))])
def test_nonsense_from_strangers_changes_nothing(folder, monkeypatch, seed):
    quicken(monkeypatch)
    failures = []

    async def run():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context))
        async with running_job(folder, steps=STEPS, shares=SHARES) as job:
            await job.until_update(1)
            num_refused = await storm(job, seed)
            assert num_refused > NUM_REQUESTS / 2
            weights = await job.finish()
            assert torch.equal(weights, alone(steps=STEPS, shares=SHARES))
            [center] = [member.center for member in job.members.values() if member.center is not None]
            assert len(center._versions) < 10 and len(center._asked) < 10, "strangers are remembered"

    asyncio.run(run())
    assert not failures, failures[0]


def test_the_drawn_requests_are_of_every_kind():
    wild = Wild(0)
    drawn = {type(wild.request()[0]) for _ in range(5000)}
    assert drawn == {OPERATIONS[name].request for name in OPERATIONS} - set(OPEN)
    assert isinstance(wild.made(Join), Join)
