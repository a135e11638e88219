"""The harness itself must fail when a rank does: a harness that cannot fail proves nothing."""

import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch

from shoal.core.errors import RunError
from shoal.testing.ranks import run_on_ranks
from support.processes.command import wait_until


def add_ranks(world, tensor):
    return {"rank": world.rank, "sum": world.all_reduce_(tensor.clone() * (world.rank + 1))}


def raise_on_one(world):
    if world.rank == 1:
        raise ValueError("planted on rank 1")
    world.barrier()


def hang_on_one(world):
    if world.rank == 1:
        time.sleep(3600)
    world.barrier()


def leave_a_child(world):
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True).pid


def test_a_process_that_a_rank_leaves_behind_fails_the_call_and_is_ended():
    with pytest.raises(RunError, match=r"processes \[\d+\] were left behind by the ranks of leave_a_child") as refusal:
        run_on_ranks(leave_a_child, 1)
    (left,) = re.findall(r"\[(\d+)\]", str(refusal.value))
    assert not psutil.pid_exists(int(left)) or psutil.Process(int(left)).status() == psutil.STATUS_ZOMBIE


def test_every_rank_gets_the_arguments_and_returns_its_result():
    first, second = run_on_ranks(add_ranks, 2, torch.ones(3))
    assert [first["rank"], second["rank"]] == [0, 1]
    assert torch.equal(first["sum"], torch.full((3,), 3.0)) and torch.equal(first["sum"], second["sum"])


def test_a_rank_that_raises_fails_the_call_with_its_traceback():
    with pytest.raises(RunError, match="planted on rank 1"):
        run_on_ranks(raise_on_one, 2)


def test_a_rank_that_hangs_is_named_at_the_deadline_and_nothing_is_left():
    run_on_ranks(add_ranks, 1, torch.ones(1))
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(RunError, match=r"ranks \[0, 1\] did not end within 8 s"):
        run_on_ranks(hang_on_one, 2, deadline_seconds=8.0)
    assert set(psutil.Process().children(recursive=True)) == before


def fork_a_child(world):
    if (child := os.fork()) == 0:
        time.sleep(3600)
    return child


def end_with(world, code):
    os._exit(code)


def kill_itself(world):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_fork_of_a_rank_is_found_too():
    with pytest.raises(RunError, match=r"processes \[\d+\] were left behind by the ranks of fork_a_child"):
        run_on_ranks(fork_a_child, 1)


@pytest.mark.parametrize(("function", "arguments", "code"), [(end_with, (7,), 7), (kill_itself, (), -9)])
def test_how_a_rank_ended_is_told(function, arguments, code):
    with pytest.raises(RunError, match=f"rank 0 ended with code {code}"):
        run_on_ranks(function, 1, *arguments)


def test_a_fork_server_that_was_killed_is_replaced():
    run_on_ranks(add_ranks, 1, torch.ones(1))
    for child in psutil.Process().children():
        if "shoal.launch.forkserver" in child.cmdline() and "shoal.testing.ranks" in child.cmdline():
            child.kill()
            wait_until(lambda child=child: child.status() == psutil.STATUS_ZOMBIE, "its death")
    (result,) = run_on_ranks(add_ranks, 1, torch.ones(1))
    assert result["rank"] == 0
