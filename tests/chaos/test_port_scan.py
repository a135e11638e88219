"""Somebody on another machine: what he finds open, and what comes of trying it.

By default nothing is open. With an address given, two ports are, and every attempt to join, kill, change or read through them is
refused while the run goes on to the same bits, with few descriptors and hundreds of idle connections held open.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.paramserver.role_commands import Roles, until
from support.processes.command import ROOT, SUPPORT, TINY, python_of_session, read_summary, wait_for_step
from support.processes.network_namespaces import Network, built_network

PEER = str(SUPPORT / "wire" / "unauthenticated_peer.py")
OURS, THEIRS = "10.79.0.1", "10.79.0.2"
CONTROL = "import socket, sys; s = socket.create_server(('0.0.0.0', 0)); print(s.getsockname()[1], flush=True); sys.stdin.read()"


@pytest.fixture
def network() -> Iterator[Network]:
    with built_network({"a": OURS, "b": THEIRS}) as made:
        yield made


def start(network: Network, where: str, *words: str, **options) -> subprocess.Popen:
    path = os.pathsep.join([str(ROOT / "tests"), *sys.path])
    return subprocess.Popen(
        [*network.enter(where), *python_of_session(*words)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )


def listening(network: Network) -> set[int]:
    """Every port that a process of our machine listens on, on whatever address."""
    done = subprocess.run(
        [*network.enter("a"), "cat", "/proc/net/tcp", "/proc/net/tcp6"], capture_output=True, text=True
    )
    fields = [line.split() for line in done.stdout.splitlines()]
    return {int(field[1].rpartition(":")[2], 16) for field in fields if field[3] == "0A"}


def scan(network: Network, ports: set[int] | None = None) -> list[int]:
    """What somebody on the other machine finds open, of all ports where none are given."""
    words = (
        PEER,
        "scan",
        OURS,
        *map(str, sorted(ports or ())),
    )
    said, _ = start(network, "b", *words).communicate(timeout=110)
    return json.loads(said)


@pytest.mark.parametrize("plan", ["dp=2", pytest.param("ps=1 workers=1 tp=2", marks=pytest.mark.soak)])
@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_nothing_is_open_by_default(network: Network, tmp_path: Path, plan: str, is_whole: bool) -> None:
    (tmp_path / "tiny.toml").write_text(TINY.replace("steps = 8", "steps = 100000"))
    train = ("-m", "shoal", "train", "tiny.toml", "--plan", plan, "--run-dir", "run")
    run = start(network, "a", *train, cwd=tmp_path, stderr=subprocess.DEVNULL)
    control = start(network, "a", "-c", CONTROL)
    try:
        port = int(control.stdout.readline())
        wait_for_step(tmp_path / "run", 1)
        ports = listening(network)
        assert len(ports) > 1, "gloo listens, on loopback, and is sealed"
        assert scan(network, None if is_whole else ports) == [port], (
            "what listens everywhere is found, and it is not ours"
        )
        assert run.poll() is None
    finally:
        for process in (run, control):
            process.kill()
            process.communicate()


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_every_attempt_on_what_is_open_is_refused_and_changes_no_bit(
    network: Network, tmp_path: Path, tiny: Path, shoal
) -> None:
    few = (*network.enter("a"), "prlimit", "--nofile=256:256", "--")
    names = ("center-0", "server-0", "worker-0")
    roles = Roles(
        tmp_path,
        tiny,
        plan="ps=1 workers=1",
        num_centers=1,
        hosts=dict.fromkeys(names, OURS),
        before=dict.fromkeys(names, few),
        port=7000,
        settings=("elastic.start_deadline=120",),
    )
    key = (tmp_path / "key.pub").read_text().strip()
    stranger = None
    try:
        roles.start("center-0")
        roles.start("server-0")
        until(roles, lambda: {7000, 7001} <= listening(network), "both to listen", 120.0)
        assert listening(network) == {7000, 7001}, "what was asked for, and no other"
        assert scan(network, {7000, 7001}) == [7000, 7001]
        doors = (f"7000:{key}", f"7001:{key}")
        stranger = start(network, "b", PEER, "attack", OURS, *doors)
        assert stranger.stdout.readline() == "began\n"
        roles.start("worker-0")
        assert [role.end(120.0) for role in roles.started] == [0, 0, 0], roles.story()
        told = json.loads(stranger.communicate(timeout=30)[0].splitlines()[-1])
    finally:
        if stranger is not None:
            stranger.kill()
            stranger.communicate()
        roles.kill_all()
    assert told["answered"] == [] and told["attempts"] >= 42, told
    shoal.run("train", tiny, "--plan", "dp=1", "--run-dir", "alone")
    found = roles.summary()
    assert found["weights_sha256"] == read_summary(tmp_path / "alone")["weights_sha256"]
    assert not found["messages_dropped"]
