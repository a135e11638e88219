"""The election by a real etcd, where there is one."""

import asyncio
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from shoal.core.clock import Deadline
from shoal.core.errors import RequestError, RunError
from shoal.elastic.election.elector import Deposed
from shoal.elastic.election.etcd import EtcdLease, find_center
from support.elastic.election_candidates import Candidate, leader, start_candidate, until
from support.paramserver.role_commands import Roles

LEASE = 1.0
TIED = """
import os, sys
from shoal.comm.parentdeath import die_with_parent
die_with_parent(int(sys.argv[1]))
os.execvp(sys.argv[2], sys.argv[2:])
"""
"""A program that is killed when the test session is."""


def test_what_is_no_address() -> None:
    with pytest.raises(RequestError, match="'etcd:2379' is no address of etcd; write http://HOST:2379"):
        EtcdLease("etcd:2379", key="k", name="a", address="ipc://a")


def free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@dataclass
class Etcd:
    """A real etcd with one member, on ports and in a folder of its own.

    Args:
        folder: where it keeps what it was told; it may be started there again.
    """

    folder: Path

    def __post_init__(self) -> None:
        for _ in range(5):
            self.url, self.peers = (f"http://127.0.0.1:{port}" for port in free_ports(2))
            if self.start():
                return
        pytest.fail(f"etcd does not start:\n{self.log.read_text()}")

    @property
    def log(self) -> Path:
        return self.folder / "etcd.log"

    def start(self) -> bool:
        """Start it and wait until it answers; False when it ended instead, because one of its ports was taken."""
        command = ["etcd", "--data-dir", str(self.folder / "data"), "--log-level", "error"]
        command += ["--listen-client-urls", self.url, "--advertise-client-urls", self.url]
        command += ["--listen-peer-urls", self.peers, "--initial-advertise-peer-urls", self.peers]
        command += ["--initial-cluster", f"default={self.peers}"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([sys.executable, "-c", TIED, str(os.getpid()), *command], stderr=log)
        while self.process.poll() is None:
            try:
                asyncio.run(find_center(self.url, key="nobody", deadline=Deadline(seconds=0.5)))
            except RunError as error:
                # As long as nobody answers, the error has the address.
                if "etcd at" not in str(error):
                    return True
        return False

    def start_again(self) -> None:
        """From what it has on its disk, on the same ports; somebody's connection may have one of them for a moment."""
        end = Deadline(seconds=60.0)
        while not self.start():
            end.check(f"etcd to start again: {self.log.read_text()}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    if shutil.which("etcd") is None:
        pytest.skip("the program etcd is not on the PATH")
    pytest.importorskip("etcd3gw")
    folder = tmp_path / "etcd"
    folder.mkdir()
    running = Etcd(folder)
    yield running
    running.kill()


@pytest.mark.soak
def test_candidates_of_etcd(etcd) -> None:
    url, server = etcd.url, etcd.process
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
    url = etcd.url
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


@pytest.mark.timeout(120)
def test_one_candidate_of_etcd(etcd) -> None:
    url = etcd.url

    async def run() -> None:
        # Long enough that a slow machine does not lose it in between.
        one = EtcdLease(url, key="k", name="a", address="ipc://a", lease_seconds=30.0)
        other = EtcdLease(url, key="k", name="b", address="ipc://b", lease_seconds=30.0)
        assert await one.campaign() == 1 and one.is_valid()
        assert [await one.advance(), await one.advance()] == [2, 3]
        await one.renew()
        found = await find_center(url, key="k", deadline=Deadline(seconds=30.0))
        assert (found.epoch, found.name, found.address) == (3, "a", "ipc://a")
        # etcd dies and comes back: it still has the key, its lease and the counter, and who leads goes on.
        etcd.kill()
        renewing = asyncio.ensure_future(one.renew())
        await asyncio.to_thread(etcd.start_again)
        await renewing
        assert one.is_valid() and await one.advance() == 4
        await one.resign()
        assert not one.is_valid() and await other.campaign() == 5
        with pytest.raises(Deposed, match="'a' was deposed from epoch 4"):
            await one.advance()
        # Somebody else ended its lease: etcd took the key with it.
        await other._store.run(other._lease.revoke)
        with pytest.raises(Deposed, match="'b' was deposed from epoch 5: its lease was not renewed"):
            await other.renew()

    asyncio.run(run())


@pytest.mark.timeout(120)
def test_a_lease_of_etcd_runs_out(etcd) -> None:
    """Who does not renew it in time knows by itself, before etcd gives the key to the next."""

    async def run() -> None:
        one, other = (
            EtcdLease(etcd.url, key="k", name=name, address=f"ipc://{name}", lease_seconds=LEASE) for name in "ab"
        )
        assert await one.campaign() == 1
        assert await other.campaign() == 2
        assert not one.is_valid()
        with pytest.raises(
            Deposed, match="'a' was deposed from epoch 1: it did nothing for as long as its lease of 1 s"
        ):
            await one.renew()

    asyncio.run(run())


ANSWERS = {
    "torn": b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n40\r\n{"header":',
    "short": b'HTTP/1.1 200 OK\r\nContent-Length: 400\r\n\r\n{"header":',
    "no result": b'HTTP/1.1 200 OK\r\nContent-Length: 33\r\n\r\n{"error":{"message":"no leader"}}',
    "not JSON": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
    "another JSON": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
    "nothing": b"",
}
VERSION = b'HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{"etcdserver": "3.4.23", "etcdcluster": "3.4.0"}'


@pytest.mark.timeout(60)
@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_an_answer_that_is_none_is_asked_for_again(answer) -> None:
    """etcd may die in the middle of an answer, and a gateway without a leader says so with status 200: no center ends of it."""
    pytest.importorskip("etcd3gw")
    num_asked = 0

    async def run() -> None:
        async def give(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal num_asked
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET /version "):
                writer.write(VERSION)
            else:
                # All of the question: who hangs up on the rest of one is reset, and the answer is never read.
                await reader.readexactly(int(re.search(rb"(?i)content-length: (\d+)", head)[1]))
                num_asked += 1
                writer.write(answer)
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(give, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            campaign = asyncio.ensure_future(
                EtcdLease(url, key="k", name="a", address="ipc://a", lease_seconds=60.0).campaign()
            )
            while num_asked < 3 and not campaign.done():
                await asyncio.sleep(0.01)
            assert not campaign.done(), campaign.exception()
            campaign.cancel()
            with pytest.raises(RunError, match=r"a center to be elected under 'k' \(etcd at "):
                await find_center(url, key="k", deadline=Deadline(seconds=0.3))

    asyncio.run(run())


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_two_centers_of_a_run_are_elected_by_etcd(etcd, shoal, tiny, tmp_path) -> None:
    """Without a majority: the leading one is paused, and the other leads; that is killed, and the one that woke leads again."""
    url = etcd.url
    # Long enough that a busy machine takes nobody for dead who is not.
    settings = ("paramserver.lease_seconds=6", "paramserver.dead_seconds=20", "elastic.start_deadline=240")
    settings += ("train.steps=100000",)
    roles = Roles(tmp_path, tiny, settings=settings, num_centers=2)
    try:
        for index in range(2):
            roles.start(f"center-{index}", "--etcd", f"{url}/run")
        for name in ("server-0", "server-1", "worker-0"):
            roles.start(name)
        worker = roles.start("worker-1")
        until(lambda: roles.step() >= 3, "the third step", 240.0)
        first, epoch = roles.leader()
        first.process.send_signal(signal.SIGSTOP)
        until(lambda: roles.leader(above=epoch), "the next center", 60.0)
        second, epoch = roles.leader()
        assert second is not first
        first.process.send_signal(signal.SIGCONT)
        until(lambda: "was deposed from epoch" in first.said(), "the one that woke to find out", 60.0)
        second.process.kill()
        until(lambda: roles.leader(above=epoch), "the next center", 60.0)
        assert roles.leader()[0] is first
        # A death needs a center that is obeyed: one that is taken for another would wait for this worker for ever.
        worker.process.kill()
        until(lambda: " servers, 1 workers" in first.said(), "a view without that worker", 120.0)
        before = roles.step()
        until(lambda: roles.step() > before + 1, "steps under it", 60.0)
    finally:
        roles.kill_all()
