"""The election by a real etcd, where there is one."""

import asyncio
import itertools
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from candidates import Candidate, leader, start_candidate, until
from cluster_cases import Roles
from shoal.core.clock import Deadline
from shoal.core.errors import RequestError, RunError
from shoal.elastic.election.elector import Deposed
from shoal.elastic.election.etcd import EtcdLease, find_center

LEASE = 1.0


def test_what_is_no_address() -> None:
    with pytest.raises(RequestError, match="'etcd:2379' is no address of etcd; write http://HOST:2379"):
        EtcdLease("etcd:2379", key="k", name="a", address="ipc://a")


def free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen]]:
    if shutil.which("etcd") is None:
        pytest.skip("no etcd here")
    pytest.importorskip("etcd3gw")
    for _ in range(5):
        clients, peers = (f"http://127.0.0.1:{port}" for port in free_ports(2))
        command = ["etcd", "--data-dir", str(tmp_path / "etcd"), "--listen-client-urls", clients]
        command += ["--advertise-client-urls", clients, "--listen-peer-urls", peers]
        command += [
            "--initial-advertise-peer-urls",
            peers,
            "--initial-cluster",
            f"default={peers}",
            "--log-level",
            "error",
        ]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            asyncio.run(find_center(clients, key="nobody", deadline=Deadline(seconds=3.0)))
        except RunError as error:
            # "(etcd at ...)" would say that it never answered: the port was taken in the meantime.
            if "etcd at" not in str(error) or process.poll() is None:
                break
    yield clients, process
    process.kill()
    process.wait()


@pytest.mark.soak
def test_candidates_of_etcd(etcd) -> None:
    url, server = etcd
    numbers = itertools.count()
    everyone: list[Candidate] = []

    def start() -> Candidate:
        one = start_candidate("etcd", name=f"c{next(numbers)}", lease_seconds=LEASE, url=url)
        everyone.append(one)
        return one

    try:
        candidates = [start() for _ in range(3)]
        until(lambda: leader(candidates), "a leader")
        # Killed.
        first = leader(candidates)
        first.send(signal.SIGKILL)
        candidates = [*(one for one in candidates if one is not first), start()]
        until(lambda: leader(candidates, above=1), "the next leader")
        # Paused.
        paused = leader(candidates)
        paused.send(signal.SIGSTOP)
        until(lambda: leader(candidates, above=2), "the third leader")
        before = len(paused.read())
        paused.send(signal.SIGCONT)
        until(lambda: paused.saw("deposed"), "the paused one to find out")
        assert not any(line["what"] == "renewed" for line in paused.read()[before:])
        assert paused.saw("deposed")[-1]["seen"] <= leader(candidates).saw("leads")[-1]["at"]
        # etcd itself is gone for a while: the leader gives up in time, and somebody leads when it is back.
        third = leader(candidates)
        epoch = third.saw("leads")[-1]["epoch"]
        until(lambda: third.saw("renewed"), "a renewal")
        server.send_signal(signal.SIGSTOP)
        until(lambda: third.saw("deposed"), "the leader to give up without etcd")
        assert "did not answer within its lease of 1 s" in third.saw("deposed")[-1]["why"]
        server.send_signal(signal.SIGCONT)
        until(lambda: leader(candidates, above=epoch), "a leader when etcd is back")
    finally:
        server.send_signal(signal.SIGCONT)
        for one in everyone:
            one.end()
    epochs = [line["epoch"] for one in everyone for line in one.told if line["what"] == "leads"]
    assert len(set(epochs)) == len(epochs)


@pytest.mark.soak
def test_races_in_etcd(etcd) -> None:
    url, _ = etcd
    numbers = itertools.count()
    racing: list[Candidate] = []

    def start() -> None:
        number = next(numbers)
        racing.append(start_candidate("etcd", name=f"c{number}", lease_seconds=LEASE, race_seed=number, url=url))

    try:
        end = time.monotonic() + 60.0
        while sum(len(one.saw("leads")) for one in racing) < 100 and time.monotonic() < end:
            while sum(one.process.poll() is None for one in racing) < 4:
                start()
            time.sleep(0.01)
    finally:
        for one in racing:
            one.end()
    epochs = [line["epoch"] for one in racing for line in one.told if line["what"] in ("leads", "advanced")]
    assert len(epochs) > 20 and len(set(epochs)) == len(epochs)


@pytest.mark.soak
def test_one_candidate_of_etcd(etcd) -> None:
    url, _ = etcd

    async def run() -> None:
        one = EtcdLease(url, key="k", name="a", address="ipc://a", lease_seconds=LEASE)
        other = EtcdLease(url, key="k", name="b", address="ipc://b", lease_seconds=LEASE)
        assert await one.campaign() == 1 and one.is_valid()
        assert [await one.advance(), await one.advance()] == [2, 3]
        await one.renew()
        found = await find_center(url, key="k", deadline=Deadline(seconds=5.0))
        assert (found.epoch, found.name, found.address) == (3, "a", "ipc://a")
        await one.resign()
        assert not one.is_valid() and await other.campaign() == 4
        with pytest.raises(Deposed, match="'a' was deposed from epoch 3"):
            await one.advance()
        other._store.client.delete("k/leader")
        with pytest.raises(Deposed, match="'b' was deposed from epoch 4: its lease was not renewed"):
            await other.renew()

    asyncio.run(run())


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_two_centers_of_a_run_are_elected_by_etcd(etcd, shoal, tiny, tmp_path) -> None:
    """Without a majority: the leading one is killed, and the other one sees the run to its end."""
    url, _ = etcd
    settings = ("paramserver.lease_seconds=1", "elastic.start_deadline=240", "train.steps=100000")
    roles = Roles(tmp_path, tiny, settings=settings, num_centers=2)
    try:
        for index in range(2):
            roles.start(f"center-{index}", "--etcd", f"{url}/run")
        for name in ("server-0", "server-1", "worker-0", "worker-1"):
            roles.start(name)
        until(lambda: roles.step() >= 3, "the third step", 240.0)
        leader, epoch = roles.leader()
        leader.process.kill()
        until(lambda: roles.leader(above=epoch), "the next center", 60.0)
        before = roles.step()
        until(lambda: roles.step() > before, "a step under it", 60.0)
    finally:
        roles.kill_all()
