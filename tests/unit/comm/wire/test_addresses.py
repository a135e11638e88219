"""Addresses: what leaves this machine needs keys, and what is none is refused with the fix."""

import pytest

from shoal.comm.wire.addresses import is_loopback, parse_address
from shoal.core.errors import RequestError

KEY = "ab" * 32


@pytest.mark.parametrize(
    ("text", "kind", "endpoint"),
    [
        ("tcp://127.0.0.1:0", "tcp", "tcp://127.0.0.1:0"),
        ("tcp://127.9.8.7:65535", "tcp", "tcp://127.9.8.7:65535"),
        ("tcp://localhost:5", "tcp", "tcp://127.0.0.1:5"),
        ("ipc:///tmp/s.sock", "ipc", "ipc:///tmp/s.sock"),
        ("inproc://a/b-1", "inproc", "inproc://a/b-1"),
    ],
)
def test_addresses_of_this_machine_need_no_keys(text, kind, endpoint):
    parsed = parse_address(text, has_keys=False)
    assert (parsed.kind, parsed.endpoint, parsed.key) == (kind, endpoint, None)
    assert parsed.is_local == (kind != "inproc")


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "*", "10.0.0.1", "example.org", "127.0.0.1.example.org", "128.0.0.1", "0177.0.0.1"]
)
def test_what_leaves_this_machine_needs_keys(host):
    assert not is_loopback(host)
    with pytest.raises(RequestError, match="shoal keys new"):
        parse_address(f"tcp://{host}:7000", has_keys=False)
    parsed = parse_address(f"tcp://{host}:7000#{KEY}", has_keys=True)
    assert parsed.key == KEY and not parsed.is_local


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:65536",
        "tcp://127.0.0.1:x",
        "tcp://[::1]:5",
        "tcp://127.0.0.1:5#abc",
        "tcp://127.0.0.1:5 ",
        "udp://127.0.0.1:5",
        "ipc://relative.sock",
        "ipc:///" + "a" * 107,
        "inproc://",
        "/tmp/s.sock",
    ],
)
def test_what_is_no_address_is_refused(text):
    with pytest.raises(RequestError):
        parse_address(text, has_keys=True)
