"""A center without rivals: its epoch grows over restarts, and members hear that it leads."""

import asyncio

import pytest

from shoal.comm.wire.node import Node, new_instance_id
from shoal.core.errors import RequestError
from shoal.elastic.election.majority import OPERATIONS, Found, Seek
from shoal.elastic.election.sole import Sole


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
