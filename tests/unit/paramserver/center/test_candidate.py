"""A candidate on one address: what it answers to whom, who is turned away at its door, and how it ends."""

import asyncio
from contextlib import asynccontextmanager
from functools import partial

import pytest

from shoal.comm.wire.errors import Refused
from shoal.comm.wire.node import Node, new_instance_id
from shoal.core.errors import RequestError
from shoal.elastic.election.elector import Center
from shoal.elastic.election.voters import Sole, Voters
from shoal.elastic.membership import Wanted
from shoal.paramserver.center.candidate import CLUSTER_OPERATIONS, Candidate
from shoal.paramserver.contact import Contact
from shoal.paramserver.messages import Greet, Greeted, Halt, Join, Joined, Leave, Watch

SETTINGS = {"train.seed": "1", "optim.lr": "0.1"}
MODEL = {"weight": ((2, 3), "float32")}


def make_node():
    return Node(instance_id=new_instance_id(), operations=CLUSTER_OPERATIONS)


@asynccontextmanager
async def stand(tmp_path, names=("center-0",), settings=SETTINGS, join_seconds=60.0):
    """Candidates that listen, and what each of them told; by name."""
    voters = {name: f"ipc://{tmp_path}/{name}" for name in names}
    made, nodes, electors = {}, [], []
    for name, address in voters.items():
        node = make_node()
        ballot = tmp_path / f"{name}.json"
        elector = (
            Voters(name=name, address=address, voters=voters, ballot=ballot, lease_seconds=0.6, node=node)
            if len(names) > 1
            else Sole(name=name, address=address, ballot=ballot)
        )
        told = []
        candidate = Candidate(
            node,
            elector,
            name=name,
            others=[other for key, other in voters.items() if key != name],
            wanted=Wanted(servers=1, backups=0, join_seconds=join_seconds),
            settings=settings,
            lonely_seconds=60.0,
            tell=told.append,
        )
        await node.listen(address, candidate.handle)
        if isinstance(elector, Voters):
            await elector.start()
        made[name] = (candidate, told)
        nodes.append(node)
        electors.append(elector)
    try:
        yield made, voters
    finally:
        for elector in electors:
            await (elector.close() if isinstance(elector, Voters) else elector.resign())
        for node in nodes:
            await node.close()


def join(name, role="server", model=MODEL, settings=SETTINGS):
    return Join(name=name, role=role, address="", model=model, settings=settings)


async def ask(node, address, body):
    return (await node.connect(address).call(body, deadline=5.0)).body


async def tell_leader(node, addresses, body):
    """Ask whichever of them leads, as soon as one does."""
    while True:
        for address in addresses:
            try:
                return await ask(node, address, body)
            except Refused as refused:
                if refused.code != "not-leading":
                    raise
        await asyncio.sleep(0.02)


def test_a_member_with_another_model_or_recipe_is_turned_away_by_name(tmp_path):
    async def run():
        async with stand(tmp_path) as (made, voters):
            candidate, _ = made["center-0"]
            running = asyncio.ensure_future(candidate.run())
            node, address = make_node(), voters["center-0"]
            assert isinstance(await tell_leader(node, [address], join("server-0")), Joined)
            other = make_node()
            with pytest.raises(
                Refused, match=r"worker-1 is not let in: its model is another one: 'weight' is \[2, 3\]"
            ):
                await ask(other, address, join("worker-1", "worker", model={"weight": ((2, 4), "float32")}))
            with pytest.raises(Refused, match=r"another one: train.seed is 1 at the center and 2 at worker-1"):
                await ask(other, address, join("worker-1", "worker", settings={**SETTINGS, "train.seed": "2"}))
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await node.close()
            await other.close()

    asyncio.run(run())


def test_the_later_of_two_with_different_recipes_goes(tmp_path):
    async def run():
        names = ("center-0", "center-1", "center-2")
        async with stand(tmp_path, names) as (made, voters):
            candidate, told = made["center-0"]
            node = make_node()
            greeted = await ask(node, voters["center-0"], Greet(name="late", settings={**SETTINGS, "train.seed": "2"}))
            assert greeted == Greeted(difference="train.seed is 1 at center-0 and 2 at late")
            assert told == ["candidate late is of another run: " + greeted.difference]
            assert await ask(node, voters["center-0"], Greet(name="late", settings=SETTINGS)) == Greeted()
            candidate._settings["optim.lr"] = "0.2"
            with pytest.raises(RequestError, match=r"center-0 is of another run than the center at ipc://"):
                await asyncio.wait_for(candidate.run(), 10.0)
            await node.close()

    asyncio.run(run())


@pytest.mark.parametrize("halt", ["", "enough"])
def test_when_the_members_have_left_all_candidates_end(tmp_path, halt):
    async def run():
        names = ("center-0", "center-1", "center-2")
        async with stand(tmp_path, names) as (made, voters):
            running = [asyncio.ensure_future(candidate.run()) for candidate, _ in made.values()]
            node = make_node()
            tell = partial(tell_leader, node, voters.values())
            await tell(join("server-0"))
            await tell(Halt(reason=halt or "finished"))
            heard = await tell(Watch(epoch=0))
            assert (heard.halt, heard.stopped) == (halt or "finished", halt)
            assert not any(one.done() for one in running), "a member is still there"
            await tell(Leave(reason="done"))
            assert await asyncio.wait_for(asyncio.gather(*running), 10.0) == [halt] * 3
            await node.close()

    asyncio.run(run())


def test_a_center_to_which_nobody_comes_takes_the_others_with_it(tmp_path):
    async def run():
        names = ("center-0", "center-1", "center-2")
        async with stand(tmp_path, names, join_seconds=0.3) as (made, _):
            running = [asyncio.ensure_future(candidate.run()) for candidate, _ in made.values()]
            ends = await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), 20.0)
            failed = [end for end in ends if isinstance(end, RequestError)]
            assert len(failed) == 1 and "0 of 1 servers" in str(failed[0])
            assert all(str(failed[0]) == str(end) for end in ends)

    asyncio.run(run())


def test_a_model_with_more_names_than_a_message_holds_is_refused_at_once(tmp_path):
    """It would be too long every time; whoever asks again for ever is never told why nobody lets it in."""
    many = {f"blocks.{index}.experts.up_projection.weight": ((2, 3), "float32") for index in range(30_000)}

    async def run():
        async with stand(tmp_path) as (made, voters):
            candidate, _ = made["center-0"]
            running = asyncio.ensure_future(candidate.run())
            node = make_node()
            found = Center(epoch=1, address=voters["center-0"], name="center-0")
            contact = Contact(node, find=lambda: found, introduce=lambda view: join("server-0", model=many))
            with pytest.raises(RequestError, match=r"a body of \d+ bytes; the limit is 1048576"):
                await asyncio.wait_for(contact.run(), 20.0)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await node.close()

    asyncio.run(run())
