"""Stopping a run on several machines: a word to the center, whoever it is, and every role ends after what is under way."""

import asyncio
import time

from shoal.comm.wire.errors import Refused, WireTimeout
from shoal.comm.wire.node import Node, new_incarnation
from shoal.core.errors import RunError
from shoal.elastic.election.elector import Center
from shoal.elastic.election.seeker import Seeker
from shoal.paramserver.candidate import CLUSTER_OPERATIONS
from shoal.paramserver.messages import Halt
from shoal.serverrun.cluster import Cluster

_CALL_SECONDS = 2.0
_LOOK_SECONDS = 0.05


async def stop_run(cluster: Cluster, *, reason: str, seconds: float) -> Center:
    """Ask the center to end the run with a checkpoint.

    Returns:
        The center that took it.

    Raises:
        RequestError: the centers refuse this process's key.
        RunError: no center took it in time.
    """
    node = Node(incarnation=new_incarnation(), operations=CLUSTER_OPERATIONS, keys=cluster.keys)
    seeker = Seeker(node, cluster.centers, patience=seconds)
    seeker.start()
    until = time.monotonic() + seconds
    try:
        while True:
            center = seeker.find()
            if center is not None:
                try:
                    await node.connect(center.address).call(Halt(reason=reason), deadline=_CALL_SECONDS)
                    return center
                except (WireTimeout, Refused):
                    pass  # It leads no longer: look again.
            if time.monotonic() > until:
                raise RunError(f"no center took the word to stop within {seconds:g} s: {seeker.describe()}")
            await asyncio.sleep(_LOOK_SECONDS)
    finally:
        await node.close()
