"""Waits on connections whose other end says nothing, as after a cable was pulled."""

import socket
import threading

import pytest

from shoal.comm.leaving.hangup import HangUp
from shoal.comm.packetfilter import CAN_DROP


def connect(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    near = socket.create_connection(listener.getsockname(), timeout=5)
    far, _ = listener.accept()
    near.settimeout(10)
    far.settimeout(10)
    return near, far


@pytest.mark.skipif(not CAN_DROP, reason="Linux only")
def test_connections_of_the_groups_end_and_no_others() -> None:
    is_broken = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        before = connect(listener)
        hang_up = HangUp(is_broken.is_set)
        inside = connect(listener)
        hang_up.settle()
        after = connect(listener)
        is_broken.set()
        assert inside[0].recv(1) == b"", "the wait ended"
        hang_up.close()
        for near, far in (before, after):
            far.sendall(b"x")
            assert near.recv(1) == b"x"
        for one in (*before, *inside, *after):
            one.close()
