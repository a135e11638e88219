"""A peer that dies or stops in the middle of an operation: every other rank says so, by name, and soon.

The ranks here are plain processes that share memory and nothing else, because one of them is meant to die: no torch group, no
launcher that would end the others first.
"""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from shoal.comm.shared import SLOT_BYTES
from shoal.comm.sharedmemory import Announcement, memory_bytes

DEADLINE_SECONDS = 2.0
NUM_RANKS = 3
RANK = """
import json, os, sys, time
import torch
from shoal.comm.channel import PeerLost
from shoal.comm.sharedmemory import Announcement, open_memory
from shoal.comm.sharedmemory import Member, Rounds, Watch
from shoal.comm.shared import SLOT_BYTES, SharedTransport

torch.set_num_threads(1)
print("up", flush=True)
told = json.loads(sys.stdin.readline())
rank, pids = told["rank"], told["pids"]
memory = open_memory(Announcement(**told["first"]), num_ranks=len(pids), slot_bytes=SLOT_BYTES)
member = Member(axis="dp", rank=rank, ranks=tuple(10 + r for r in range(len(pids))), pids=tuple(pids))
rounds = Rounds(memory, Watch(member), member, deadline_seconds=told["deadline"], spin_seconds=0.0)
transport = SharedTransport(memory, rounds)
assert transport.all_reduce_(one := torch.ones(1)) is None and one.item() == len(pids)
if rank == 1:
    SharedTransport._fold = lambda *_: os.kill(os.getpid(), told["how"])
found = []
for attempt in range(2):
    started = time.monotonic()
    try:
        transport.all_reduce_(torch.ones(SLOT_BYTES))
    except PeerLost as error:
        found.append([str(error), list(error.ranks), time.monotonic() - started])
print(json.dumps(found), flush=True)
# The first to notice stays, so that the others see one lost peer and not two.
sys.stdin.readline()
transport.close()
"""


def lose(how):
    """What ranks 0 and 2 saw when rank 1 was lost, and rank 1's process id."""
    processes = [
        subprocess.Popen([sys.executable, "-c", RANK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(NUM_RANKS)
    ]
    token = 12345
    memory = os.memfd_create(Announcement(pid=0, token=token).name())
    try:
        os.ftruncate(memory, memory_bytes(NUM_RANKS, SLOT_BYTES))
        os.pwrite(memory, token.to_bytes(8, "little"), 0)
        pids = [process.pid for process in processes]
        first = {"pid": os.getpid(), "descriptor": memory, "token": token}
        for process in processes:
            assert process.stdout.readline() == "up\n"
        for rank, process in enumerate(processes):
            told = {"rank": rank, "pids": pids, "first": first, "how": int(how), "deadline": DEADLINE_SECONDS}
            process.stdin.write(json.dumps(told) + "\n")
            process.stdin.flush()
        return [json.loads(processes[rank].stdout.readline()) for rank in (0, 2)], pids[1]
    finally:
        os.close(memory)
        for process in processes:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()


@pytest.mark.parametrize(
    ("how", "words", "longest"),
    [(signal.SIGKILL, "died", 1.5), (signal.SIGSTOP, "did not arrive within the deadline of 2 s", 4.0)],
)
def test_a_lost_peer_is_named_by_every_other_rank(how, words, longest):
    started = time.monotonic()
    survivors, pid = lose(how)
    assert len(survivors) == 2 and time.monotonic() - started < 60
    for rank, found in zip((10, 12), survivors, strict=True):
        (message, ranks, waited), (again, _, waited_again) = found
        assert ranks == [11] and f"rank 11 (pid {pid}) {words}" in message
        assert "'all_reduce'" in message and "axis dp" in message and f"rank {rank} waited" in message
        assert waited < longest
        assert again == message and waited_again < 0.5, "a group that failed must not be used again"
