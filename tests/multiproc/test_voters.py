"""A majority of three voters, each a real process with its ballot on disk; killed, paused, and cut off in network namespaces."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.comm.wire.keys import make_keys
from support.elastic.election_candidates import Candidate, leader, start_candidate, until

LEASE = 0.6
NAMES = ("a", "b", "c")


class Three:
    """Three voters that can be started, ended and looked at."""

    def __init__(self, folder: Path, *, lease_seconds: float = LEASE) -> None:
        self.folder = folder
        self.lease_seconds = lease_seconds
        self.voters = {name: f"ipc://{folder}/{name}" for name in NAMES}
        self.keys = ""
        self.all: list[Candidate] = []
        self.name_of: dict[int, str] = {}

    def start(self, name: str, before: tuple[str, ...] = ()) -> Candidate:
        one = start_candidate(
            "voters",
            name=name,
            lease_seconds=self.lease_seconds,
            before=before,
            voters=self.voters,
            ballot=str(self.folder / f"{name}.ballot"),
            keys=self.keys,
        )
        self.all.append(one)
        self.name_of[id(one)] = name
        return one

    def check(self) -> None:
        """No term had two leaders, and none was valid after the next had begun."""
        led = [(line["epoch"], line["at"], one) for one in self.all for line in one.saw("leads")]
        assert len({epoch for epoch, _, _ in led}) == len(led)
        for epoch, _, one in led:
            seen = max((line["seen"] for line in one.read() if line["epoch"] == epoch), default=0.0)
            later = [at for other, at, _ in led if other > epoch]
            assert not later or seen <= min(later), f"term {epoch} was valid when the next had begun"


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Three]:
    made = Three(tmp_path)
    yield made
    for one in made.all:
        one.end()


def test_a_killed_leader_is_replaced_and_comes_back_as_a_voter(three: Three) -> None:
    candidates = [three.start(name) for name in NAMES]
    until(lambda: leader(candidates), "a leader")
    first = leader(candidates)
    epoch = first.saw("leads")[-1]["epoch"]
    killed = first.send(signal.SIGKILL)
    candidates.remove(first)
    until(lambda: leader(candidates, above=epoch), "the next leader")
    second = leader(candidates)
    took = second.saw("leads")[-1]["at"] - killed
    assert took < 10 * LEASE, took
    # With the third one gone too, only the one that comes back can make a majority.
    candidates.append(three.start(three.name_of[id(first)]))
    epoch = second.saw("leads")[-1]["epoch"]
    second.send(signal.SIGKILL)
    candidates.remove(second)
    until(lambda: leader(candidates, above=epoch), "a majority with the one that came back")
    three.check()


def test_a_paused_leader_wakes_up_deposed(three: Three) -> None:
    candidates = [three.start(name) for name in NAMES]
    until(lambda: leader(candidates), "a leader")
    paused = leader(candidates)
    until(lambda: paused.saw("renewed"), "a renewal")
    epoch = paused.saw("leads")[-1]["epoch"]
    paused.send(signal.SIGSTOP)
    until(lambda: leader(candidates, above=epoch), "the next leader")
    before = len(paused.read())
    paused.send(signal.SIGCONT)
    until(lambda: paused.saw("deposed"), "the paused one to find out")
    assert not any(line["what"] == "renewed" for line in paused.read()[before:])
    assert paused.saw("deposed")[-1]["valid"] is False
    three.check()


def test_two_of_three_dead_is_no_majority(three: Three) -> None:
    candidates = [three.start(name) for name in NAMES]
    until(lambda: leader(candidates), "a leader")
    first = leader(candidates)
    for one in candidates:
        if one is not first:
            one.send(signal.SIGKILL)
    until(lambda: first.saw("deposed"), "the leader without voters to find out")
    assert "no majority renewed its lease" in first.saw("deposed")[-1]["why"]
    # Ballots are on disk: with one of them back there is a leader again, under a later term.
    other = three.start(next(name for name in NAMES if name != three.name_of[id(first)]))
    until(lambda: leader([first, other], above=first.saw("leads")[0]["epoch"]), "a majority again")
    three.check()


# ---- network namespaces


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def network(three: Three) -> Iterator[Three]:
    """Each voter in a namespace of its own, joined by a bridge in a fourth: taking a link down cuts a voter off."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2")
    tag = f"s{os.getpid() % 100000}"
    spaces = [f"{tag}{name}" for name in ("h", *NAMES)]
    made = []
    try:
        for space in spaces:
            try:
                ip("netns", "add", space)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespaces here: {error.stderr.decode()}")
            made.append(space)
        hub = spaces[0]
        ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        ip("-n", hub, "link", "set", "bridge", "up")
        for number, (name, space) in enumerate(zip(NAMES, spaces[1:], strict=True), 1):
            ip("-n", hub, "link", "add", "name", f"to-{name}", "type", "veth", "peer", "name", "eth", "netns", space)
            ip("-n", hub, "link", "set", f"to-{name}", "master", "bridge", "up")
            ip("-n", space, "addr", "add", f"10.77.0.{number}/24", "dev", "eth")
            ip("-n", space, "link", "set", "eth", "up")
            ip("-n", space, "link", "set", "lo", "up")
        three.voters = {name: f"tcp://10.77.0.{number}:7000" for number, name in enumerate(NAMES, 1)}
        make_keys(three.folder / "key")
        three.keys = str(three.folder / "key")
        three.hub = hub
        three.enter = {name: ("ip", "netns", "exec", space) for name, space in zip(NAMES, spaces[1:], strict=True)}
        yield three
    finally:
        for one in three.all:
            one.end()
        for space in made:
            ip("netns", "del", space)


def test_a_leader_that_is_cut_off_gives_up_and_the_others_elect(network: Three) -> None:
    candidates = [network.start(name, before=network.enter[name]) for name in NAMES]
    until(lambda: leader(candidates), "a leader")
    first = leader(candidates)
    until(lambda: first.saw("renewed"), "a renewal")
    epoch = first.saw("leads")[-1]["epoch"]
    name = network.name_of[id(first)]
    ip("-n", network.hub, "link", "set", f"to-{name}", "down")
    others = [one for one in candidates if one is not first]
    until(lambda: leader(others, above=epoch), "the majority to elect")
    until(lambda: first.saw("deposed"), "the minority's leader to give up")
    second = leader(others)
    assert first.saw("deposed")[-1]["seen"] <= second.saw("leads")[-1]["at"]
    renewed = len(second.saw("renewed"))
    ip("-n", network.hub, "link", "set", f"to-{name}", "up")
    until(lambda: len(second.saw("renewed")) > renewed + 3, "the new leader to go on when the network is whole again")
    assert len(second.saw("leads")) == 1 and not second.saw("deposed"), "the one that came back does not disturb it"
    network.check()
