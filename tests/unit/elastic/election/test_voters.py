"""Three voters in one process, over inproc sockets; and the ballots on disk."""

import asyncio
from pathlib import Path

import pytest

from shoal.comm.wire.errors import Refused
from shoal.comm.wire.node import Node, new_instance_id
from shoal.core.clock import Deadline
from shoal.core.errors import RequestError, RunError
from shoal.elastic.election.elector import Deposed
from shoal.elastic.election.majority import OPERATIONS, Ballot, Found, Poll, Seek
from shoal.elastic.election.voters import Sole, Voters, find_center, load_ballot, save_ballot

NAMES = ("a", "b", "c")


def voters(folder: Path, lease_seconds: float = 1.0) -> tuple[dict[str, str], list[Voters]]:
    addresses = {name: f"inproc://{folder.name}-{name}" for name in NAMES}
    made = [
        Voters(
            name=name,
            address=f"ipc://{name}",
            voters=addresses,
            ballot=folder / name / "ballot",
            lease_seconds=lease_seconds,
        )
        for name in NAMES
    ]
    return addresses, made


def test_elect_renew_advance_resign(tmp_path: Path) -> None:
    async def run() -> None:
        addresses, three = voters(tmp_path)
        for one in three:
            await one.start()
        a, b, c = three
        assert await a.campaign() == 1 and a.is_valid() and not b.is_valid()
        found = await find_center(addresses.values(), deadline=Deadline(seconds=5.0))
        assert (found.epoch, found.name, found.address) == (1, "a", "ipc://a")
        await a.renew()
        assert [await a.advance(), await a.advance()] == [2, 3] and a.epoch == 3
        assert load_ballot(tmp_path / "b" / "ballot", name="b").term >= 2, "a majority has it on disk"
        await a.resign()
        assert not a.is_valid()
        with pytest.raises(Deposed, match="'a' was deposed from epoch 3: no majority renewed its lease"):
            await a.renew()
        assert await asyncio.wait_for(c.campaign(), 5.0) > 3
        for one in three:
            await one.close()

    asyncio.run(run())


def test_nobody_leads(tmp_path: Path) -> None:
    async def run() -> None:
        addresses, (one, *_) = voters(tmp_path)
        await one.start()
        with pytest.raises(RunError, match=r"waited 0.1 s for one of the voters at .* to lead"):
            await find_center(list(addresses.values())[:1], deadline=Deadline(seconds=0.1))
        await one.close()

    asyncio.run(run())


def test_a_stranger_gets_no_vote(tmp_path: Path) -> None:
    async def run() -> None:
        addresses, (one, *_) = voters(tmp_path)
        await one.start()
        node = Node(instance_id=new_instance_id(), operations=OPERATIONS)
        with pytest.raises(Refused, match="'z' is not another of the voters a, b, c"):
            await node.connect(addresses["a"]).call(Poll(9, "z", "", False, 0.0), deadline=2.0)
        await node.close()
        await one.close()
        assert not (tmp_path / "a" / "ballot").exists()

    asyncio.run(run())


def test_ballots(tmp_path: Path) -> None:
    path = tmp_path / "ballot"
    assert load_ballot(path, name="a") == Ballot()
    save_ballot(path, Ballot(term=7, vote="b"), name="a")
    assert load_ballot(path, name="a") == Ballot(term=7, vote="b")
    with pytest.raises(RequestError, match="is the ballot of 'a', not of 'b'"):
        load_ballot(path, name="b")
    path.write_text('{"term": 7')
    with pytest.raises(RequestError, match="is not the ballot of a voter"):
        load_ballot(path, name="a")


def test_who_is_not_on_the_list(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="'z' is not one of the voters a, b, c"):
        Voters(name="z", address="", voters=dict.fromkeys(NAMES, ""), ballot=tmp_path / "ballot")
    with pytest.raises(RequestError, match="at least 3 voters"):
        Voters(name="a", address="", voters={"a": "", "b": ""}, ballot=tmp_path / "ballot")


def make(tmp_path, name="center-0"):
    return Sole(name=name, address="inproc://sole", ballot=tmp_path / "votes" / "ballot.json")


def test_it_leads_at_once_and_under_a_higher_epoch_after_every_start(tmp_path):
    async def lead():
        sole = make(tmp_path)
        assert not sole.is_valid()
        first = await sole.campaign()
        assert sole.is_valid() and sole.epoch == first
        second = await sole.advance()
        await sole.resign()
        assert not sole.is_valid()
        return first, second

    assert asyncio.run(lead()) == (1, 2)
    assert asyncio.run(lead()) == (3, 4)


def test_its_ballot_is_its_own(tmp_path):
    asyncio.run(make(tmp_path).advance())
    with pytest.raises(RequestError, match="ballot of 'center-0', not of 'center-1'"):
        make(tmp_path, name="center-1")


def test_members_are_told_only_while_it_leads(tmp_path):
    async def ask():
        sole = make(tmp_path)
        node = Node(instance_id=new_instance_id(), operations=OPERATIONS)
        await node.listen("inproc://sole", sole.answer)
        said = [(await node.connect("inproc://sole").call(Seek(), deadline=5.0)).body]
        await sole.campaign()
        said.append((await node.connect("inproc://sole").call(Seek(), deadline=5.0)).body)
        await node.close()
        return said

    assert asyncio.run(ask()) == [Found(0, "", ""), Found(1, "center-0", "inproc://sole")]
