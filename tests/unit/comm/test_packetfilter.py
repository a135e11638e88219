"""Whom the kernel lets connect to a listening socket."""

import contextlib
import socket

import pytest

from shoal.comm.packetfilter import CAN_DROP, MOST_ADDRESSES, drop_addresses, drop_everybody, sealed_listeners

pytestmark = pytest.mark.skipif(not CAN_DROP, reason="packet filters of sockets are Linux's")


def connects(door: socket.socket, source: str) -> bool:
    with socket.socket() as one:
        one.bind((source, 0))
        one.settimeout(0.2)
        with contextlib.suppress(TimeoutError):
            one.connect(door.getsockname())
            return True
        return False


def test_addresses_are_dropped_and_let_in_again():
    with socket.create_server(("127.0.0.1", 0)) as door:
        others = [f"10.1.{number // 256}.{number % 256}" for number in range(MOST_ADDRESSES - 2)]
        drop_addresses(door.fileno(), ["127.0.0.2", *others, "127.0.0.3"])
        assert [connects(door, f"127.0.0.{last}") for last in (1, 2, 3, 4)] == [True, False, False, True]
        drop_addresses(door.fileno(), ["127.0.0.4"])
        assert [connects(door, f"127.0.0.{last}") for last in (2, 4)] == [True, False]
        drop_addresses(door.fileno(), [])
        drop_addresses(door.fileno(), [])
        assert connects(door, "127.0.0.4")


def test_sealing_is_of_what_began_to_listen_inside_and_ends_no_connection():
    with socket.create_server(("127.0.0.1", 0)) as before, socket.socket() as idle:
        idle.bind(("127.0.0.1", 0))
        with contextlib.ExitStack() as stack:
            with sealed_listeners():
                inside = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
                client = stack.enter_context(socket.create_connection(inside.getsockname()))
            accepted = stack.enter_context(inside.accept()[0])
            assert connects(before, "127.0.0.1")
            assert not connects(inside, "127.0.0.1")
            client.sendall(b"still here")
            assert accepted.recv(10) == b"still here"
            accepted.sendall(b"yes")
            assert client.recv(3) == b"yes"


def test_everybody_is_dropped():
    with socket.create_server(("127.0.0.1", 0)) as door:
        drop_everybody(door.fileno())
        assert not connects(door, "127.0.0.1")


def can_connect(listener: socket.socket) -> bool:
    with socket.socket() as caller:
        caller.settimeout(0.3)
        try:
            caller.connect(listener.getsockname())
        except TimeoutError:
            return False
        return True


@pytest.mark.skipif(not CAN_DROP, reason="only Linux has packet filters for sockets")
@pytest.mark.parametrize(("lazy", "is_open"), [(None, False), ("0", False), ("1", True), ("true", True)])
def test_what_began_to_listen_is_sealed_unless_peers_are_still_to_come(monkeypatch, lazy, is_open):
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT", raising=False)
    if lazy is not None:
        monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", lazy)
    with socket.create_server(("127.0.0.1", 0)) as before:
        with sealed_listeners():
            inside = socket.create_server(("127.0.0.1", 0))
        with inside:
            assert can_connect(before) and can_connect(inside) is is_open
