"""Ranks on several hosts: the real coordinator and real agents, on loopback over a stand-in for ssh."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from itertools import permutations
from pathlib import Path

import pytest

from shoal.core.errors import RequestError
from shoal.doctor.checks import State
from shoal.doctor.hosts import examine_hosts
from shoal.launch.blame import Outcome
from shoal.launch.failurereport import headline
from shoal.launch.hosts.generation import supervise_hosts
from shoal.telemetry.statusboard import StatusReading
from support.processes.remote_shell import agent_pid, make_fleet
from support.processes.supervised_ranks import Recorder, all_in, make_request, nothing_left, once

__all__ = ["nothing_left"]
HOSTS = {"127.0.0.1": 1, "localhost": 2}
WAITING = "rank_status.enter('wait: others', 3)\nfor_ever()"


def run_on_hosts(folder: Path, body: str, display: Recorder | None = None, **options: object) -> Outcome:
    recorder = display or Recorder()
    (folder / "run").mkdir(exist_ok=True)
    hosts, fleet = options.pop("hosts", HOSTS), options.pop("fleet", {})
    request = make_request(folder, body, recorder, num_ranks=sum(hosts.values()), **options)  # type: ignore[attr-defined, arg-type]
    outcome = supervise_hosts(request, make_fleet(folder, hosts, **fleet))  # type: ignore[arg-type]
    assert recorder.is_closed
    return outcome


def strike(act: Callable[[Sequence[StatusReading]], None]) -> Recorder:
    return Recorder(once(all_in("wait: others"), act))


@pytest.mark.soak
def test_ranks_of_two_hosts_find_each_other_in_the_store_and_know_their_places(tmp_path: Path) -> None:
    body = """
    from datetime import timedelta
    from shoal.comm.store.agentstore import AgentStore
    store = AgentStore(os.environ["SHOAL_STORE"])
    store.set_timeout(timedelta(seconds=20))
    store.set(f"at/{rank}", os.environ["LOCAL_RANK"] + "/" + os.environ["LOCAL_WORLD_SIZE"])
    assert [store.get(f"at/{other}") for other in range(size)] == [b"0/1", b"0/2", b"1/2"], "places"
    assert store.add("n", 1) >= 1
    until(lambda: store.add("n", 0) == size)
    assert not store.check(["n", "absent"]) and store.check(["n"])
    assert store.compare_set("first", "", str(rank)) in (b"0", b"1", b"2")
    assert store.get("first") == store.compare_set("first", "x", "y")
    try:
        store.wait(["absent"], timedelta(seconds=0.2))
        raise SystemExit("it waited for nothing")
    except RuntimeError as error:
        assert "absent" in str(error)
    print(f"rank {rank} is done")
    """
    display = Recorder()
    outcome = run_on_hosts(tmp_path, body, display)
    assert outcome.status == "completed", (outcome, display.text)
    assert "rank 0 is done" in display.text and "[rank 2] rank 2 is done" in display.text
    assert "login script" not in display.text


def test_a_rank_that_is_killed_is_named_with_its_host_and_all_end(tmp_path: Path) -> None:
    struck: list[float] = []

    def kill(states: Sequence[StatusReading]) -> None:
        struck.append(time.monotonic())
        os.kill(states[2].pid, signal.SIGKILL)

    outcome = run_on_hosts(tmp_path, WAITING, strike(kill))
    assert time.monotonic() - struck[0] < 5.0
    assert outcome.exit_code == 1 and outcome.culprit is not None
    assert headline(outcome.culprit) == (
        "rank 2 on host localhost failed at step 3 in phase 'wait: others': killed by signal 9 (SIGKILL)"
    )
    assert "rank 0 on 127.0.0.1 was at step 3 in phase 'wait: others' and was stopped" in outcome.culprit.others


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT), pytest.param(signal.SIGTERM, marks=pytest.mark.soak)])
def test_a_signal_stops_the_ranks_of_all_hosts(tmp_path: Path, number: signal.Signals) -> None:
    body = """
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    rank_status.enter('wait: others', 3)
    until(lambda: asked)
    rank_status.finish('interrupted', stop_signal=15)
    os._exit(3)
    """
    display = strike(lambda states: os.kill(os.getpid(), number))
    outcome = run_on_hosts(tmp_path, body, display)
    assert (outcome.status, outcome.exit_code, outcome.was_forced) == ("interrupted", 128 + number, False)
    assert display.text.count("finishing the step") == 1


@pytest.mark.soak
def test_an_agent_that_is_killed_takes_its_ranks_along_and_its_host_is_named(tmp_path: Path) -> None:
    outcome = run_on_hosts(
        tmp_path, WAITING, strike(lambda states: os.kill(agent_pid(tmp_path, "localhost"), signal.SIGKILL))
    )
    assert outcome.culprit is not None and (outcome.culprit.kind, outcome.culprit.host) == ("host", "localhost")
    assert "the remote shell died of signal 9" in outcome.culprit.cause


def test_a_process_that_ssh_leaves_behind_with_its_standard_error_keeps_nobody_waiting(tmp_path: Path) -> None:
    (tmp_path / "localhost.stays").touch()
    struck: list[float] = []

    def strike_agent(states: Sequence[StatusReading]) -> None:
        struck.append(time.monotonic())
        os.kill(agent_pid(tmp_path, "localhost"), signal.SIGKILL)

    outcome = run_on_hosts(tmp_path, WAITING, strike(strike_agent))
    assert outcome.culprit is not None and outcome.culprit.host == "localhost"
    assert time.monotonic() - struck[0] < 10, "it lives for 20 s"


def test_a_silent_host_is_named_within_its_lease(tmp_path: Path) -> None:
    stopped: list[float] = []

    def stop(states: Sequence[StatusReading]) -> None:
        stopped.append(time.monotonic())
        os.kill(agent_pid(tmp_path, "localhost"), signal.SIGSTOP)

    outcome = run_on_hosts(tmp_path, WAITING, strike(stop), lease_seconds=1.0)
    # Its last word may have come a little before.
    assert 0.5 <= time.monotonic() - stopped[0] < 5.0
    assert outcome.culprit is not None and outcome.culprit.host == "localhost"
    assert "no sign of life" in outcome.culprit.cause and "elastic.lease_seconds 1" in outcome.culprit.cause


@pytest.mark.soak
def test_ranks_are_started_again_on_all_hosts_and_find_an_empty_store(tmp_path: Path) -> None:
    body = """
    from datetime import timedelta
    from shoal.comm.store.agentstore import AgentStore
    store = AgentStore(os.environ["SHOAL_STORE"])
    assert store.add("came", 1) <= size, "an old key"
    store.set_timeout(timedelta(seconds=20))
    until(lambda: store.add("came", 0) == size)
    if generation == 0 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if generation == 0:
        for_ever()
    """
    outcome = run_on_hosts(tmp_path, body, max_restarts=1)
    assert (outcome.status, outcome.restarts) == ("completed", 1)


@pytest.mark.soak
def test_an_agent_that_was_lost_is_started_again_with_its_ranks(tmp_path: Path) -> None:
    body = """
    rank_status.enter('wait: others', 3)
    if generation == 0:
        for_ever()
    """
    display = strike(lambda states: os.kill(agent_pid(tmp_path, "localhost"), signal.SIGKILL))
    outcome = run_on_hosts(tmp_path, body, display, max_restarts=1, lease_seconds=2.0)
    assert (outcome.status, outcome.restarts) == ("completed", 1)


def test_a_host_that_cannot_be_reached_is_named_before_a_rank_starts(tmp_path: Path) -> None:
    (tmp_path / "localhost.down").touch()
    with pytest.raises(RequestError) as refused:
        run_on_hosts(tmp_path, "print('started')")
    assert all(word in str(refused.value) for word in ("host localhost", "No route to host", "--ssh"))
    assert "127.0.0.1" not in str(refused.value)
    assert not list((tmp_path / "run").glob(".door*"))


@pytest.mark.soak
def test_a_host_without_the_interpreter_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"host localhost: .*not found; install Shoal there at the same path"):
        run_on_hosts(tmp_path, "print('started')", fleet={"python": "/nowhere/python"})


def test_doctor_tries_every_way_and_names_the_host_that_is_not_there(tmp_path: Path) -> None:
    hosts = {"127.0.0.1": 1, "localhost": 1, "127.0.0.3": 1}
    (tmp_path / "127.0.0.3.down").touch()
    found = {check.name: check for check in examine_hosts(make_fleet(tmp_path, hosts))}
    assert found["host 127.0.0.3"].state is State.WRONG and "No route to host" in found["host 127.0.0.3"].advice
    # It failed at once, and the others had not come then.
    assert all("Shoal" in found[f"host {name}"].found for name in HOSTS), found
    # Whether one way is slower than the other is for the load of this machine to say.
    assert all(found[f"{one} to {other}"].values["bytes_per_s"] > 1e5 for one, other in permutations(HOSTS)), found
