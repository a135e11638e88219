"""A server of another run was the first at admission, was turned away, and its model stayed: every right one was turned away too.

The center takes the model that the first server brings for the run's. It did so before it had compared that server's recipe with
its own, so a server that was started with the wrong recipe decided what the servers of the right one were compared with, and all
of them ended with "its model is another one".
"""

import asyncio

import pytest

from shoal.comm.wire.errors import Refused
from shoal.comm.wire.node import Node, new_instance_id
from shoal.elastic.election.voters import Sole
from shoal.elastic.membership import Wanted
from shoal.paramserver.center.center import Center
from shoal.paramserver.messages import OPERATIONS, Join, Joined

DEADLINE = 10.0


def join(width, hidden):
    model = {"weight": ((2, width), "float32")}
    return Join(name="server-0", role="server", address="", model=model, settings={"model.hidden": hidden})


async def knock(folder):
    nodes = [Node(instance_id=new_instance_id(), operations=OPERATIONS) for _ in range(3)]
    address = f"ipc://{folder}/center.sock"
    elector = Sole(name="center-0", address=address, ballot=folder / "ballot.json")
    center = Center(
        nodes[0], elector, wanted=Wanted(servers=1, backups=0), tell=lambda line: None, settings={"model.hidden": "3"}
    )
    await nodes[0].listen(address, center.handle)
    running = asyncio.ensure_future(center.run())
    try:
        with pytest.raises(
            Refused, match=r"its recipe is another one: model.hidden is 3 at the center and 4 at server-0"
        ):
            while True:
                try:
                    await nodes[1].connect(address).call(join(4, "4"), deadline=DEADLINE)
                except Refused as refused:
                    if refused.code != "not-leading":
                        raise
                    await asyncio.sleep(0.01)
        answer = await nodes[2].connect(address).call(join(3, "3"), deadline=DEADLINE)
        assert isinstance(answer.body, Joined)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for node in nodes:
            await node.close()


def test_who_is_turned_away_does_not_decide_who_comes_in(tmp_path):
    asyncio.run(knock(tmp_path))
