"""Roles started by hand, each with one command and a key: three centers, two servers with backups, two workers, on loopback."""

import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from shoal.comm.wire.keys import make_keys
from support.paramserver.role_commands import Roles, until
from support.processes.command import read_summary

QUICK = ("paramserver.lease_seconds=1", "paramserver.dead_seconds=3", "elastic.start_deadline=240")


@pytest.fixture
def roles(tmp_path: Path, tiny: Path) -> Iterator[Roles]:
    made = Roles(tmp_path, tiny, settings=QUICK)
    yield made
    made.kill_all()


def ends(roles: Roles, expect: int = 0) -> dict[str, int]:
    """Wait for everyone who was not killed; who ended otherwise than expected."""
    codes = {role.name: role.end(240.0) for role in roles.started}
    return {name: code for name, code in codes.items() if code not in (expect, -signal.SIGKILL)}


def newest_view(roles: Roles) -> str:
    """The newest that any center published: who leads may change, and a center says other things too."""
    lines = (line for role in roles.started if role.name.startswith("center") for line in role.said().splitlines())
    views = [(int(found[1]), line) for line in lines if (found := re.match(r"epoch (\d+): \d+ servers, ", line))]
    return max(views)[1]


def stop(shoal, roles: Roles, reason: str, *, keys: Path | None = None, expect: int = 0) -> None:
    words = ("role", "stop", "--centers", ",".join(roles.seats), "--reason", reason)
    shoal.run(*words, "--keys", keys or roles.keys, expect=expect, timeout=200)


def together(shoal, tiny: Path, steps: int) -> str:
    """The weights that two replicas have after so many steps."""
    shoal.run(*("train", tiny, "--plan", "dp=2", "--set", f"train.steps={steps}", "--run-dir", "together"), timeout=300)
    return read_summary(shoal.folder / "together")["weights_sha256"]


@pytest.mark.timeout(600)
def test_seven_commands_train_as_one_though_the_leading_center_is_killed(shoal, tiny, roles):
    # Many more steps than are done until the kill, on any machine.
    steps = "train.steps=60"
    roles.settings = (*QUICK, steps)
    shoal.run("train", tiny, "--plan", "dp=2", "--set", steps, "--run-dir", "together", timeout=300)
    roles.start_all()
    until(roles, lambda: roles.step() >= 2, "the second step", 240.0)
    leader, _ = roles.leader()
    leader.process.kill()
    assert ends(roles) == {}, roles.story()
    found, wanted = roles.summary(), read_summary(shoal.folder / "together")
    assert found["status"] == "completed" and found["steps"] == 60
    assert found["weights_sha256"] == wanted["weights_sha256"], roles.story()
    assert found["validation_loss"] == pytest.approx(wanted["validation_loss"], rel=1e-6)
    assert not (roles.folder / "events").exists(), (
        "a worker has no run directory, and leaves nothing where it was started"
    )


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_an_elected_center_takes_over_a_membership_change(shoal, tiny, roles):
    """The leading center and a worker die together: the others elect, and what the worker was doing is done by the other one."""
    roles.settings = (*QUICK, "train.steps=40")
    members = roles.start_all()
    until(roles, lambda: roles.step() >= 3, "the third step", 240.0)
    leader, epoch = roles.leader()
    leader.process.kill()
    members["worker-0"].process.kill()
    until(roles, lambda: roles.leader(above=epoch), "the next center", 240.0)
    assert ends(roles) == {}, roles.story()
    assert roles.summary()["weights_sha256"] == together(shoal, tiny, 40)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_server_that_died_is_started_again_by_the_same_command(shoal, tiny, roles):
    roles.settings = (*QUICK, "train.steps=100000")
    members = roles.start_all()
    until(roles, lambda: roles.step() >= 4, "the fourth step", 240.0)
    members["server-0"].process.kill()
    members["server-0"].end()
    until(roles, lambda: "1 servers, 2 workers" in newest_view(roles), "a view without it", 60.0)
    roles.start("server-0", "--resume")
    until(roles, lambda: "2 servers, 2 workers" in newest_view(roles), "a view with it", 240.0)
    stop(shoal, roles, "enough")
    assert ends(roles, expect=3) == {}, roles.story()
    assert roles.summary()["weights_sha256"] == together(shoal, tiny, roles.summary()["steps"])


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_strangers_and_other_runs_are_turned_away_and_a_stop_ends_all(shoal, tiny, roles):
    """One with another key hears that; one with another model hears which parameter; one with another seed, which setting."""
    roles.settings = (*QUICK, "train.steps=100000")
    roles.start_all()
    until(roles, lambda: roles.step() >= 1, "the first step", 240.0)
    make_keys(roles.folder / "strange")
    stranger = roles.start("worker-2", replaced={"--keys": str(roles.folder / "strange")})
    larger = roles.start("worker-3", "--set", "model.hidden=64")
    other = roles.start("worker-4", "--set", "train.seed=5")
    center = roles.start("center-1", "--set", "train.seed=5", replaced={"--run-dir": str(roles.folder / "elsewhere")})
    for role, says in (
        (stranger, "has another key than the one that it is called by here"),
        (larger, "is not let in: its model is another one: '"),
        (other, "train.seed is 1 at the center and 5 at worker-4"),
        (center, "cannot listen on"),
    ):
        assert role.end(240.0) == 2 and says in role.said(), roles.story()
        assert role.said().splitlines()[-1].startswith("error: "), role.said()
    roles.started = [role for role in roles.started if role.process.poll() is None]
    stop(shoal, roles, "no", keys=roles.folder / "strange", expect=2)
    stop(shoal, roles, "enough")
    assert ends(roles, expect=3) == {}, roles.story()
    assert roles.summary()["status"] == "interrupted" and roles.summary()["stopped_by"] == "enough"


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_sole_center_is_started_again_and_a_worker_leaves_by_sigterm(shoal, tiny, tmp_path):
    roles = Roles(tmp_path, tiny, settings=(*QUICK, "train.steps=100000"), num_centers=1)
    try:
        members = roles.start_all()
        until(roles, lambda: roles.step() >= 3, "the third step", 240.0)
        members["center-0"].process.kill()
        members["center-0"].end()
        before = roles.step()
        until(roles, lambda: roles.step() > before, "a step without a center")
        roles.start("center-0")
        until(roles, lambda: roles.leader(above=2), "the center to come back", 240.0)
        members["worker-1"].process.terminate()
        assert members["worker-1"].end() == 128 + signal.SIGTERM, roles.story()
        roles.started.remove(members["worker-1"])
        before = roles.step()
        until(roles, lambda: roles.step() >= before + 3, "steps without that worker", 60.0)
        stop(shoal, roles, "enough")
        assert ends(roles, expect=3) == {}, roles.story()
        assert "nobody replaces it" in members["center-0"].said()
        assert roles.summary()["weights_sha256"] == together(shoal, tiny, roles.summary()["steps"])
    finally:
        roles.kill_all()


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_second_worker_of_one_index_is_turned_away_until_the_first_is_dead(shoal, tiny, tmp_path):
    # None that is alive is silent for so long.
    settings = (*QUICK, "paramserver.dead_seconds=15", "train.steps=100000")
    roles = Roles(tmp_path, tiny, settings=settings, num_centers=1)
    try:
        members = roles.start_all()
        until(roles, lambda: roles.step() >= 1, "the first step", 240.0)
        first = members["worker-0"]
        second = roles.start("worker-0")
        assert second.end(240.0) == 2, roles.story()
        says = f"error: worker-0 is not let in: process {first.process.pid} on {socket.gethostname()} ("
        assert says in second.said() and "is worker-0 already, and was heard " in second.said(), roles.story()
        assert first.process.poll() is None and "taken for dead" not in first.said(), roles.story()
        before = roles.step()
        until(roles, lambda: roles.step() > before, "a step of the first", 60.0)
        # Nobody tells the center of this death: it finds out by itself, and only then is the third let in.
        center = members["center-0"]
        told = len(center.said())
        first.process.kill()
        first.end()
        third = roles.start("worker-0")
        until(roles, lambda: "2 servers, 1 workers" in center.said()[told:], "a view without the first", 60.0)
        until(roles, lambda: "2 servers, 2 workers" in newest_view(roles), "a view with the third", 240.0)
        assert third.process.poll() is None, roles.story()
        roles.started.remove(second)
        stop(shoal, roles, "enough")
        assert ends(roles, expect=3) == {}, roles.story()
        assert roles.summary()["weights_sha256"] == together(shoal, tiny, roles.summary()["steps"])
    finally:
        roles.kill_all()


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_another_runs_center_at_the_same_address_takes_nobody_over(shoal, tiny, tmp_path):
    """The only center dies; before anybody starts it again, another run of the same recipe and key begins at its address."""
    ours = Roles(tmp_path, tiny, settings=(*QUICK, "train.steps=100000"), num_centers=1)
    theirs = Roles(tmp_path, tiny, settings=ours.settings, num_centers=1)
    theirs.seats, theirs.run_dir = ours.seats, tmp_path / "theirs"
    try:
        members = ours.start_all()
        until(ours, lambda: ours.step() >= 1, "the first step", 240.0)
        members.pop("center-0").process.kill()
        theirs.start_all()
        for name, role in members.items():
            assert role.end(240.0) == 2, ours.story()
            assert f"{name} is not let in: it belongs to the run " in role.said(), ours.story()
        until(theirs, lambda: theirs.step() >= 1, "the first step of the other run", 240.0)
        assert (ours.run_dir / "run.id").read_text() != (theirs.run_dir / "run.id").read_text()
        stop(shoal, theirs, "enough")
        assert ends(theirs, expect=3) == {}, theirs.story()
    finally:
        ours.kill_all()
        theirs.kill_all()


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_server_that_is_killed_is_started_again_by_its_own_command(shoal, tiny, roles):
    roles.settings = (*QUICK, "train.steps=60")
    for seat in range(3):
        roles.start(f"center-{seat}")
    kept = roles.start("server-0", "--restarts", "2")
    for name in ("server-1", "worker-0", "worker-1"):
        roles.start(name)
    until(roles, lambda: roles.step() >= 2, "the second step", 240.0)
    (child,) = (one for one in psutil.Process(kept.process.pid).children() if "role" in one.cmdline())
    child.kill()
    assert ends(roles) == {}, roles.story()
    assert "this server was killed by signal 9 (SIGKILL); starting it again, 1 restarts left" in kept.said()
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4} ", kept.log.read_text()), "a log has times"
    assert roles.summary()["weights_sha256"] == together(shoal, tiny, 60)
