import contextlib
import os
import socket
import subprocess
import sys
import time

import pytest

from shoal.doctor.checks import State
from shoal.doctor.network import (
    check_backends,
    check_interface,
    check_ports,
    describe_backends,
    is_loopback,
    resolve,
)
from shoal.doctor.processes import OurProcess, our_processes

LISTENER = """
import socket, sys
server = socket.create_server((sys.argv[1], 0))
print(server.getsockname()[1], flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def listening(address: str):
    """A rank of a live run, whose supervisor is this process, that listens on an address."""
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "run-of-the-test", "SHOAL_SUPERVISOR_PID": str(os.getpid())}
    process = subprocess.Popen(
        [sys.executable, "-c", LISTENER, address],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process.pid, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def ours(pid: int) -> list[OurProcess]:
    return [process for process in our_processes() if process.pid == pid]


def test_gloo_is_there_and_its_address_was_measured():
    check = check_backends()
    assert check.values["gloo"] is True
    assert check.values["gloo_address"] is not None and check.values["gloo_address"] in check.found


def test_a_torch_that_hangs_is_named_within_the_deadline():
    start = time.monotonic()
    check = check_backends(seconds=0.5, probe="import time; time.sleep(60)")
    assert time.monotonic() - start < 10
    assert check.state is State.WRONG and "0.5 s" in check.advice


def test_a_torch_that_fails_is_quoted():
    check = check_backends(probe="raise ImportError('libtorch.so is not there')")
    assert check.state is State.WRONG and "libtorch.so is not there" in check.advice


def test_a_torch_without_gloo_is_wrong():
    values = {"torch": "2.13", "gloo": False, "gloo_address": None, "nccl": True, "cuda": True, "devices": 8}
    check = describe_backends(values)
    assert check.state is State.WRONG and "no gloo" in check.found and "8 devices" in check.found


def test_a_gloo_that_would_listen_to_the_world_is_a_note():
    values = {"torch": "2.13", "gloo": True, "gloo_address": "10.0.0.7", "nccl": False, "cuda": False, "devices": 0}
    assert describe_backends(values).state is State.NOTE
    assert describe_backends({**values, "gloo_address": "127.0.0.1"}).state is State.OK


def test_loopback_is_found():
    check = check_interface()
    assert check.state is not State.WRONG
    assert check.values["loopback"] and check.values["hostname"] == socket.gethostname()


def test_a_name_that_does_not_resolve_has_no_address():
    assert resolve("there-is-no-such-host.invalid") == []
    assert resolve("localhost")


def test_a_rank_that_listens_on_every_interface_is_wrong():
    with listening("0.0.0.0") as (pid, port):
        check = check_ports(ours(pid))
        assert check.state is State.WRONG
        assert check.values["exposed"] == [{"pid": pid, "address": "0.0.0.0", "port": port}]
        assert f"0.0.0.0:{port} of process {pid}" in check.advice


def test_a_rank_that_listens_on_loopback_is_fine():
    with listening("127.0.0.1") as (pid, _):
        found = ours(pid)
        assert len(found) == 1
        assert check_ports(found).state is State.OK


@pytest.mark.parametrize("address", ["127.0.0.1", "127.1.2.3", "::1", "::ffff:127.0.0.1"])
def test_loopback_addresses(address):
    assert is_loopback(address)


@pytest.mark.parametrize(
    "address", ["0.0.0.0", "::", "10.0.0.1", "fe80::1%eth0", "::ffff:10.0.0.1", "02:42:ac:11:00:02"]
)
def test_other_addresses(address):
    assert not is_loopback(address)
