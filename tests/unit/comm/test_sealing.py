"""A listening socket that opened inside the block is sealed, unless gloo was told to connect later."""

import socket

import pytest

from shoal.comm.packetfilter import CAN_DROP
from shoal.comm.sealing import sealed_listeners


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
