"""What a rank that leaves its groups does for those who wait for it there."""

import contextlib
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch._C._distributed_c10d import FileStore, ProcessGroupGloo

from shoal.comm.leaving.connections import noted_connections, shut_connections
from shoal.comm.packetfilter import CAN_DROP

pytestmark = pytest.mark.skipif(not CAN_DROP, reason="connections are found by Linux's list of descriptors")


def connect(stack: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    client = stack.enter_context(socket.create_connection(listener.getsockname(), timeout=5))
    return client, stack.enter_context(listener.accept()[0])


def has_ended(end: socket.socket) -> bool:
    end.settimeout(0.05)
    try:
        return end.recv(1) == b""
    except TimeoutError:
        return False


def test_connections_that_were_noted_end_and_no_others():
    with contextlib.ExitStack() as stack:
        other, _ = connect(stack)
        with noted_connections():
            noted, far = connect(stack)
        later, _ = connect(stack)
        shut_connections()
        assert [has_ended(end) for end in (noted, far, other, later)] == [True, True, False, False]
        shut_connections()


def test_those_of_a_group_that_could_not_be_made_end_at_once():
    with contextlib.ExitStack() as stack:
        with pytest.raises(RuntimeError, match="a peer died"), noted_connections():
            noted, far = connect(stack)
            raise RuntimeError("a peer died")
        assert has_ended(noted) and has_ended(far)


def test_a_connection_whose_number_another_has_now_is_left_alone():
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        with noted_connections():
            noted = socket.create_connection(listener.getsockname(), timeout=5)
        number = noted.fileno()
        noted.close()
        client = stack.enter_context(socket.create_connection(listener.getsockname(), timeout=5))
        assert client.fileno() == number, "the lowest number that is free"
        shut_connections()
        assert not has_ended(client)


def test_a_rank_that_waits_in_gloo_is_told_though_the_group_is_still_referred_to(tmp_path):
    def join(rank: int) -> ProcessGroupGloo:
        return ProcessGroupGloo(FileStore(str(tmp_path / "store"), 2), rank, 2, timedelta(seconds=20))

    with ThreadPoolExecutor(2) as threads:
        with noted_connections():
            groups = list(threads.map(join, range(2)))
        waiting = threads.submit(lambda: groups[1].broadcast(torch.zeros(3), 0).wait())
        started = time.monotonic()
        shut_connections()
        with pytest.raises(RuntimeError):
            waiting.result(timeout=20)
        assert time.monotonic() - started < 10
