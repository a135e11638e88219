"""A member's look-out for the center: the highest epoch counts, old words do not, and a stranger is told that it is one."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from shoal.comm.wire.keys import load_keys, make_keys
from shoal.comm.wire.node import Node, new_instance_id
from shoal.core.errors import RequestError, RunError
from shoal.elastic.election.majority import OPERATIONS, Found
from shoal.elastic.election.seeker import Seeker


class Clock:
    """Real time, and as much more as a test says."""

    def __init__(self):
        self.more = 0.0

    def __call__(self):
        return asyncio.get_running_loop().time() + self.more


def make_node(keys=None):
    return Node(instance_id=new_instance_id(), operations=OPERATIONS, keys=keys)


@asynccontextmanager
async def candidates(*epochs, keys=None):
    """Candidates that say they lead under these epochs, 0 for none; their addresses, and what they say, to be changed."""
    said, node, addresses = list(epochs), make_node(keys), []

    def answering(index):
        async def answer(request):
            await request.answer(Found(said[index], f"c{index}", "elsewhere"))

        return answer

    try:
        for index in range(len(said)):
            addresses.append(await node.listen("tcp://127.0.0.1:0", answering(index)))
        yield addresses, said
    finally:
        await node.close()


async def until(condition, seconds=10.0):
    end = asyncio.get_running_loop().time() + seconds
    while not (found := condition()):
        assert asyncio.get_running_loop().time() < end
        await asyncio.sleep(0.01)
    return found


def test_the_highest_epoch_counts_and_a_lower_one_never_again():
    async def run():
        async with candidates(0, 3, 2) as (addresses, said):
            node = make_node()
            seeker = Seeker(node, addresses, search_seconds=60.0)
            seeker.start()
            first = await until(seeker.find)
            # The two may have answered one after the other.
            first = await until(lambda: found if (found := seeker.find()) and found.epoch == 3 else None)
            assert first.name == "c1" and first.address == addresses[1], "the address is the one that was given"
            said[:] = [5, 0, 2]
            second = await until(lambda: found if (found := seeker.find()) and found.epoch == 5 else None)
            assert second.name == "c0"
            said[:] = [0, 0, 4]
            await until(lambda: seeker.find() is None)
            await asyncio.sleep(0.5)
            assert seeker.find() is None, "epoch 4 is over"
            await node.close()

    asyncio.run(run())


def test_nobody_there_is_said_by_name():
    async def run():
        clock, node = Clock(), make_node()
        seeker = Seeker(node, ["tcp://127.0.0.1:9"], search_seconds=60.0, clock=clock)
        seeker.start()
        assert seeker.find() is None
        await until(lambda: "has not answered" in seeker.describe())
        clock.more = 61.0
        with pytest.raises(RunError, match=r"within 60 s: tcp://127\.0\.0\.1:9 has not answered; is it up"):
            seeker.find()
        await node.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("knows_them", "says"),
    [(True, "refused this process's key"), (False, "has another key than the one that it is called by here")],
)
def test_a_stranger_hears_that_its_key_is_refused(tmp_path, knows_them, says):
    """It may know the key of the candidate; if it does not, it calls the candidate by its own, as one key for all is called."""
    make_keys(tmp_path / "ours")
    make_keys(tmp_path / "strange")

    async def run():
        async with candidates(7, keys=load_keys(tmp_path / "ours")) as (addresses, _):
            clock, node = Clock(), make_node(load_keys(tmp_path / "strange"))
            if not knows_them:
                addresses = [address.partition("#")[0] for address in addresses]
            seeker = Seeker(node, addresses, search_seconds=600.0, clock=clock)
            seeker.start()
            await until(lambda: says in seeker.describe())
            assert seeker.find() is None
            clock.more = 6.0
            with pytest.raises(RequestError, match="shoal keys show"):
                seeker.find()
            await node.close()

    asyncio.run(run())


def test_a_lost_center_is_told_of_and_waited_for_with_an_end():
    async def run():
        async with candidates(3) as (addresses, said):
            clock, node, told = Clock(), make_node(), []
            seeker = Seeker(node, addresses, search_seconds=60.0, lost_seconds=100.0, tell=told.append, clock=clock)
            seeker.start()
            await until(seeker.find)
            said[:] = [0]
            await until(lambda: seeker.find() is None)
            assert told == []
            clock.more = 12.0
            assert seeker.find() is None and seeker.find() is None
            assert len(told) == 1 and told[0].startswith("the center of epoch 3 was heard last 1"), told
            assert "is there and does not lead; waiting for one for 100 s" in told[0]
            said[:] = [4]
            await until(seeker.find)
            assert told[1:] == ["there is a center again: c0 of epoch 4"]
            said[:] = [0]
            await until(lambda: seeker.find() is None)
            clock.more += 101.0
            with pytest.raises(RunError, match="start the centers again, each with its --run-dir"):
                seeker.find()
            await node.close()

    asyncio.run(run())
