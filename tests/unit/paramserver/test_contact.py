"""A member's line to the center: a successor is seen at once, whatever the member was waiting for."""

import asyncio

import pytest

from shoal.comm.wire.node import Node, new_instance_id
from shoal.elastic.election.elector import Center
from shoal.elastic.view import View
from shoal.paramserver import contact as contact_module
from shoal.paramserver.contact import Contact, Evicted
from shoal.paramserver.messages import OPERATIONS, Halt, Join, Joined, Watch, Watched

VIEW = View(epoch=7, servers=(), workers=(), chains=())


def introduce(view):
    return Join(name="worker-0", role="worker", address="", model={}, view=view, settings={}, started=0.0)


async def answer(request):
    match request.body:
        case Join():
            await request.answer(Joined())
        case Watch(epoch=epoch):
            if epoch < VIEW.epoch:
                await request.answer(Watched(view=VIEW, halt="", stopped=""))


def test_who_knocks_at_a_dead_center_turns_to_its_successor(tmp_path, monkeypatch):
    # Whoever waited for the answer of the dead one would wait for longer than a test may take.
    monkeypatch.setattr(contact_module, "_ANSWER_SECONDS", 3600.0)
    dead = Center(epoch=1, address=f"ipc://{tmp_path}/dead.sock", name="center-0")
    asked = []

    async def run():
        node, successor = (Node(instance_id=new_instance_id(), operations=OPERATIONS) for _ in range(2))
        address = await successor.listen(f"ipc://{tmp_path}/successor.sock", answer)
        found = [dead]

        def find():
            asked.append(found[0])
            if len(asked) == 3:
                found[0] = Center(epoch=2, address=address, name="center-1")
            return found[0]

        contact = Contact(node, find=find, introduce=introduce)
        contact.start()
        try:
            assert await contact.newer_than(0, 30.0), "it still waits for the one that is dead"
            assert contact.view == VIEW
        finally:
            await contact.stop()
            await node.close()
            await successor.close()

    asyncio.run(run())
    assert asked[:3] == [dead] * 3


async def turn_away(request):
    match request.body:
        case Join():
            await request.refuse("evicted", "it was silent for too long")


@pytest.mark.timeout(60)
def test_who_is_out_does_not_wait_for_answers_that_cannot_come(tmp_path):
    """A server that was paused has a vote on a checkpoint under way when it hears that it is out: it must not wait for that."""

    async def run():
        node, center = (Node(instance_id=new_instance_id(), operations=OPERATIONS) for _ in range(2))
        address = await center.listen(f"ipc://{tmp_path}/center.sock", turn_away)
        contact = Contact(node, find=lambda: Center(epoch=1, address=address, name="center-0"), introduce=introduce)
        contact.start()
        try:
            with pytest.raises(TimeoutError, match="no center will answer halt"):
                await contact.tell(Halt(reason="no"), deadline=3600.0)
            with pytest.raises(Evicted, match="silent for too long"):
                contact.check()
        finally:
            await contact.stop()
            await node.close()
            await center.close()

    asyncio.run(run())
