"""A cut network: roles in three namespaces, and the one of the leading center loses its link in the middle of training.

    the leader's     center  server-0  worker-0
    another          center  server-1  worker-1
    the third        center

What is left after the cut has two centers, a copy of every shard and a worker.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.paramserver.role_commands import Roles, until
from support.processes.command import read_summary
from support.processes.network_namespaces import Network, built_network

HOSTS = {"a": "10.78.0.1", "b": "10.78.0.2", "c": "10.78.0.3"}
SETTINGS = (
    "train.steps=100000",
    "checkpoint.every=50",
    "paramserver.lease_seconds=1",
    "paramserver.dead_seconds=3",
    "elastic.start_deadline=240",
)


@pytest.fixture
def network() -> Iterator[Network]:
    with built_network(HOSTS) as made:
        yield made


@pytest.fixture
def roles(network: Network, tmp_path: Path, tiny: Path) -> Iterator[Roles]:
    hosts = {f"center-{seat}": host for seat, host in enumerate(HOSTS.values())}
    made = Roles(tmp_path, tiny, settings=SETTINGS, hosts=hosts, port=7000)
    for seat, name in enumerate(HOSTS):
        made.before[f"center-{seat}"] = network.enter(name)
    yield made
    made.kill_all()


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_the_majority_goes_on_and_the_one_that_was_cut_off_is_refused(shoal, tiny, network, roles, capsys):
    for seat in range(3):
        roles.start(f"center-{seat}")
    leader, _ = until(roles, roles.leader, "a center", 300.0)
    name = list(HOSTS)[int(leader.name.partition("-")[2])]
    rest = next(other for other in HOSTS if other != name)
    for member, where in (("server-0", name), ("worker-0", name), ("server-1", rest), ("worker-1", rest)):
        roles.hosts[member], roles.before[member] = HOSTS[where], network.enter(where)
        roles.start(member)
    until(roles, lambda: roles.step() >= 3, "the third step", 300.0)
    again, epoch = roles.leader()
    assert again is leader, "this machine is too busy for a lease of a second"
    cut = network.set_link(name, "down")
    second, _ = until(roles, lambda: roles.leader(above=epoch), "the majority to elect", 60.0)
    elected = time.monotonic() - cut
    until(roles, lambda: "was deposed from epoch" in leader.said(), "the center that was cut off to give up", 60.0)
    deposed = time.monotonic() - cut
    before = roles.step()
    until(roles, lambda: roles.step() >= before + 3, "training to go on", 120.0)
    went_on = time.monotonic() - cut
    until(
        roles, lambda: "1 servers, 1 workers" in second.said().splitlines()[-1], "a view of those that are left", 60.0
    )
    healed = network.set_link(name, "up")
    until(roles, lambda: "2 servers, 2 workers" in second.said().splitlines()[-1], "everybody to be back", 240.0)
    back = time.monotonic() - healed
    before = roles.step()
    until(roles, lambda: roles.step() >= before + 3, "training to go on with everybody", 60.0)
    assert roles.leader()[0] is second, "the one that came back does not disturb"
    led = [line for line in leader.said().splitlines() if line.startswith("center of epoch")]
    assert led == [f"center of epoch {epoch}"], "the old center leads no more"
    stop = [
        sys.executable,
        "-m",
        "shoal",
        "role",
        "stop",
        "--centers",
        ",".join(roles.seats),
        "--keys",
        str(roles.keys),
    ]
    subprocess.run([*network.enter(rest), *stop], check=True, timeout=100, capture_output=True)
    codes = {role.name: role.end(240.0) for role in roles.started}
    assert set(codes.values()) == {3}, f"{codes}\n{roles.story()}"
    steps = roles.summary()["steps"]
    shoal.run("train", tiny, "--plan", "dp=2", "--set", f"train.steps={steps}", "--run-dir", "together", timeout=600)
    assert roles.summary()["weights_sha256"] == read_summary(shoal.folder / "together")["weights_sha256"]
    with capsys.disabled():
        print(
            f"\ncut off {leader.name} with namespace {name}: elected after {elected:.1f} s, gave up after {deposed:.1f} s, "
            f"three more steps after {went_on:.1f} s, all back {back:.1f} s after the link, {steps} steps in all"
        )
