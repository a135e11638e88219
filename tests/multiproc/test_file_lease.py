"""The election on one machine, with real processes that are killed, paused, and let race."""

import itertools
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.elastic.election.filelease import list_epochs, read_center
from support.elastic.election_candidates import Candidate, leader, start_candidate, until

LEASE = 0.6


@pytest.fixture
def stand(tmp_path: Path) -> Iterator:
    """Start candidates; end them with the test."""
    started: list[Candidate] = []

    def start(number: int, *, lease_seconds: float = LEASE) -> list[Candidate]:
        more = [
            start_candidate("folder", name=f"c{len(started) + i}", lease_seconds=lease_seconds, folder=str(tmp_path))
            for i in range(number)
        ]
        started.extend(more)
        return more

    yield start
    for one in started:
        one.end()


def test_a_killed_leader_is_replaced_long_before_its_lease_runs_out(stand, tmp_path: Path) -> None:
    candidates = stand(3, lease_seconds=30.0)
    took = []
    until(lambda: leader(candidates), "a leader")
    for epoch in (1, 2):
        dead = leader(candidates)
        killed = dead.send(signal.SIGKILL)
        candidates.remove(dead)
        until(lambda above=epoch: leader(candidates, above=above), "the next leader")
        took.append(leader(candidates).saw("leads")[-1]["at"] - killed)
        center = read_center(tmp_path)
        assert (center.epoch, center.address) == (epoch + 1, f"ipc://{center.name}")
    assert min(took) < 0.5, took


def test_a_paused_leader_is_replaced_after_its_lease_and_wakes_up_deposed(stand, tmp_path: Path) -> None:
    candidates = stand(2)
    until(lambda: leader(candidates), "a leader")
    paused = leader(candidates)
    until(lambda: len(paused.saw("renewed")) >= 2, "renewals")
    stopped = paused.send(signal.SIGSTOP)
    until(lambda: leader(candidates, above=1), "the next leader")
    following = leader(candidates, above=1)
    elected = following.saw("leads")[-1]
    renewed = paused.saw("renewed")[-1]["at"]
    assert elected["epoch"] == 2 and elected["at"] - renewed > LEASE * 0.8, "not before the lease ran out"
    assert elected["at"] - stopped < LEASE * 5
    before = len(paused.read())
    paused.send(signal.SIGCONT)
    until(lambda: paused.saw("deposed"), "the paused one to find out")
    woke = paused.read()[before:]
    assert woke[0]["what"] in ("invalid", "deposed") and not any(line["what"] == "renewed" for line in woke)
    assert woke[-1]["valid"] is False and "'c" in woke[-1]["why"] and "epoch 1" in woke[-1]["why"]
    assert woke[-1]["seen"] <= elected["at"], "both were valid at one moment"
    assert read_center(tmp_path).epoch == 2


def test_many_candidates_at_once(stand, tmp_path: Path) -> None:
    candidates = stand(6, lease_seconds=30.0)
    until(lambda: leader(candidates), "a leader")
    until(lambda: read_center(tmp_path), "the center in the folder")
    assert [len(one.saw("leads")) for one in candidates].count(1) == 1
    assert list_epochs(tmp_path) == [1]


def check_race(folder: Path, *, rounds: int, seconds: float) -> None:
    """Candidates race, die and are paused; then: one owner per epoch, and no leader valid within another's lease."""
    generator = random.Random(rounds)
    numbers = itertools.count(1)
    racing: list[Candidate] = []
    over: list[Candidate] = []

    def start() -> Candidate:
        number = next(numbers)
        return start_candidate("folder", name=f"c{number}", lease_seconds=0.3, race_seed=number, folder=str(folder))

    try:
        racing = [start() for _ in range(5)]
        end = time.monotonic() + seconds
        while sum(len(one.saw("leads")) for one in racing + over) < rounds:
            assert time.monotonic() < end, f"only {sum(len(one.saw('leads')) for one in racing + over)} rounds"
            one = generator.choice(racing)
            one.send(signal.SIGSTOP)
            time.sleep(generator.choice((0.001, 0.02, 0.5)))
            one.send(signal.SIGCONT)
            for dead in [one for one in racing if one.process.poll() is not None]:
                racing.remove(dead)
                over.append(dead)
                racing.append(start())
    finally:
        for one in racing + over:
            one.end()
    owners = Counter(
        line["epoch"] for one in racing + over for line in one.told if line["what"] in ("leads", "advanced")
    )
    assert max(owners.values()) == 1, f"epochs with two leaders: {[e for e, n in owners.items() if n > 1]}"
    starts = {line["epoch"]: line["at"] for one in racing + over for line in one.told if line["what"] != "seen"}
    for one in racing + over:
        own = {line["epoch"] for line in one.told}
        for line in one.told:
            later = [epoch for epoch in starts if epoch > line["epoch"] and epoch not in own]
            if line["what"] == "seen" and later:
                assert line["seen"] <= starts[min(later)], f"{line} overlaps epoch {min(later)}"
    assert len(list_epochs(folder)) <= 7 and len(list(folder.glob("candidate-*"))) <= len(over) + 5


def test_no_epoch_has_two_leaders(tmp_path: Path) -> None:
    check_race(tmp_path, rounds=60, seconds=30.0)


@pytest.mark.soak
def test_no_epoch_has_two_leaders_in_long_races(tmp_path: Path) -> None:
    check_race(tmp_path, rounds=1500, seconds=600.0)
