"""A node in a process of its own that calls an address it cannot trust, and says at the end what it was told.

``caller_process.py ADDRESS ARENAS CALLS`` prints one line of JSON. What a right answer to call N holds is ``right_payload(N)``.
"""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil

from shoal.comm.wire.errors import WireTimeout
from support.processes.command import python_of_session
from support.wire.operations import Echo, make_node, noise

SIZES = (0, 5, 70_000, 0, 5, 300_000, 2_500_000, 40)
"""Bytes of an answer's payload, by the call's number: in the message, and once in chunks."""
ATTEMPTS = 3
ATTEMPT_SECONDS = 0.25


def right_payload(number) -> np.ndarray:
    return noise(SIZES[number % len(SIZES)], number)


def start(address, *, arenas, num_calls):
    """The process; it is killed with the test session."""
    return subprocess.Popen(
        python_of_session(__file__, address, arenas, num_calls),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


async def ask(peer, number, tally):
    """One call: its right answer, or an error that names whom was waited for."""
    expected = right_payload(number)
    # Every other one says where the payload is to go.
    into = np.full(expected.size, 7, np.uint8) if number % 2 and expected.size else None
    try:
        found = await peer.call(
            Echo(number), deadline=ATTEMPTS * ATTEMPT_SECONDS, attempts=ATTEMPTS, into=into, key=str(number)
        )
    except WireTimeout as error:
        tally["failed"] += 1
        tally["unnamed"] += peer.address not in str(error) or "echo" not in str(error)
        return
    payload = b"" if found.payload is None else bytes(found.payload)
    is_right = found.body.number == number and payload == expected.tobytes()
    tally["right" if is_right else "wrong"] += 1


async def work(address, arenas, num_calls):
    errors = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(str(context)))
    node = make_node(arena_dir=Path(arenas))
    peer = node.connect(address)
    tally = dict.fromkeys(("right", "wrong", "failed", "unnamed"), 0)
    resident = 0
    for number in range(num_calls):
        if number == num_calls // 5:
            resident = psutil.Process().memory_info().rss
        await ask(peer, number, tally)
    # What is still on its way belongs to the count too.
    before = -1
    while node.counters["received"] != before:
        before = node.counters["received"]
        await asyncio.sleep(0.5)
    grown = psutil.Process().memory_info().rss - resident
    counts, num_streams = dict(node.counters.as_dict()), len(peer._streams)
    await node.close()
    print(json.dumps({**tally, "counts": counts, "grown": grown, "num_streams": num_streams, "errors": errors[:3]}))


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1], sys.argv[2], int(sys.argv[3])))
