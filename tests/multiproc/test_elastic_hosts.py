"""Runs on several hosts that go on when a rank or a host dies: the real coordinator, real agents and real ranks, on loopback.

Every run must end in the weights of the run that nobody disturbed, to the bit.
"""

import json
import os
import sys

import pytest

from shoal.telemetry.summaryfile import read_summary
from support.processes.command import ROOT, TINY, read_events, wait_for_step
from support.processes.remote_shell import make_shell

DEATHS = 'callbacks = ["support.elastic.deaths:Deaths"]\n'
HOSTS = "127.0.0.1", "localhost"
SCALED = {"train.micro_batch": 2, "optim.scale": "linear", "optim.scale_base": 4, "elastic.batch": "scale"}
_UNDISTURBED = {}


@pytest.fixture
def mortal(shoal):
    """A recipe whose ranks die where a test says."""
    path = shoal.folder / "mortal.toml"
    path.write_text(DEATHS + TINY.replace("every = 3", "every = 0"))
    return path


def words_of(shoal, recipe, plan, *, per_host=1, steps=12, **settings):
    changes = {"train.steps": steps, "elastic.mode": "shrink", "elastic.lease_seconds": 3, **settings}
    hosts = ",".join(f"{host}:{per_host}" for host in HOSTS)
    return [
        "train", recipe, "--plan", plan, "--run-dir", "run", "--hosts", hosts, "--ssh", make_shell(shoal.folder),
        "--python", sys.executable, *(word for key, value in changes.items() for word in ("--set", f"{key}={value}")),
    ]  # fmt: skip


def variables(deaths=""):
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    return {"DEATHS": deaths, "PYTHONPATH": path}


def undisturbed(shoal, recipe, plan, steps=12):
    """The hash of the weights when nobody dies, on one host, by the mode that knows nothing of elastic runs."""
    if (plan, steps) not in _UNDISTURBED:
        shoal.run(
            "train",
            recipe,
            "--plan",
            plan,
            "--run-dir",
            "calm",
            "--set",
            f"train.steps={steps}",
            environment=variables(),
        )
        _UNDISTURBED[plan, steps] = read_summary(shoal.folder / "calm")["weights_sha256"]
    return _UNDISTURBED[plan, steps]


def read_views(shoal):
    lines = (shoal.folder / "run" / "events" / "supervisor.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == "view"]


def check(shoal, recipe, plan, deaths, *, views, steps=12, **settings):
    done = shoal.run(*words_of(shoal, recipe, plan, steps=steps, **settings), environment=variables(deaths))
    summary = read_summary(shoal.folder / "run")
    assert summary["status"] == "completed" and summary["steps"] == steps
    assert summary["weights_sha256"] == undisturbed(shoal, recipe, plan, steps), done.stderr
    assert summary["elastic"]["views"] == views, done.stderr
    return done, summary


def test_a_killed_rank_is_done_without_and_named_with_its_host(shoal, mortal):
    done, summary = check(shoal, mortal, "dp=2", "rank 1@5:microbatch", views=2)
    assert "lost rank 1 on localhost" in done.stderr and "SIGKILL" in done.stderr
    assert [view["hosts"] for view in read_views(shoal)] == [list(HOSTS), ["127.0.0.1"]]
    assert summary["elastic"]["paused_seconds"] < 10
    resumed = read_events(shoal.folder / "run", 0, "resumed")
    assert [(event["epoch"], event["source"]) for event in resumed] == [(2, "own")]


@pytest.mark.soak
def test_a_lost_agent_takes_its_host_along_and_the_other_goes_on(shoal, mortal):
    # The agent dies by the hand of its own rank, in the middle of a step.
    done, _ = check(shoal, mortal, "dp=2", "rank 1@5:microbatch:agent", views=2)
    assert "lost host localhost with rank 1" in done.stderr and "died of signal 9" in done.stderr
    assert [view["hosts"] for view in read_views(shoal)] == [list(HOSTS), ["127.0.0.1"]]


@pytest.mark.soak
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "death", ["rank 0@5:gradients", "rank 3@5:update", "rank 2@5:microbatch:agent", "rank 0@5:start:agent"]
)
def test_four_replicas_on_two_hosts(shoal, mortal, zero, death):
    plan = f"dp=4 zero={zero}" if zero else "dp=4"
    check(shoal, mortal, plan, death, views=2, per_host=2)
    (resumed, *_) = read_events(shoal.folder / "run", 0, "resumed")
    assert resumed["source"] != "checkpoint"


@pytest.mark.soak
def test_a_rank_may_die_when_the_ranks_of_a_view_have_just_connected(shoal, mortal):
    """The others have a group already, which they must leave before they meet anew."""
    _, summary = check(shoal, mortal, "dp=4", "rank 3@5:gradients;rank 2@2:connected", views=2, per_host=2)
    assert len(read_views(shoal)) == 3, "that of epoch 2 was never entered"
    assert summary["elastic"]["paused_seconds"] < 20


@pytest.mark.soak
def test_a_stopped_host_is_done_without_after_its_lease(shoal, mortal):
    done, _ = check(shoal, mortal, "dp=2", "rank 1@5:microbatch:host-stop", views=2)
    assert "host localhost" in done.stderr and ("elastic.lease_seconds 3" in done.stderr or "silent" in done.stderr)


@pytest.mark.soak
@pytest.mark.parametrize("steps", [12, 1500])
def test_one_that_died_comes_back_on_its_host_or_too_late(shoal, mortal, steps):
    settings = {"elastic.rejoin": "true"}
    shoal.run(*words_of(shoal, mortal, "dp=2", steps=steps, **settings), environment=variables("rank 1@4:microbatch"))
    summary = read_summary(shoal.folder / "run")
    assert summary["weights_sha256"] == undisturbed(shoal, mortal, "dp=2", steps=steps)
    assert [view["replicas"] for view in read_views(shoal)] == ([2, 1] if steps == 12 else [2, 1, 2])


@pytest.mark.soak
def test_with_fewer_than_min_dp_the_run_fails_and_names_the_host(shoal, mortal):
    words = words_of(shoal, mortal, "dp=2", **{"elastic.min_dp": 2})
    done = shoal.run(*words, environment=variables("rank 1@5:microbatch:agent"), expect=1)
    assert "1 of 2 replicas are left, and elastic.min_dp is 2" in done.stderr and "host localhost" in done.stderr


def test_what_hosts_cannot_do_is_refused_before_an_agent_starts(shoal, mortal):
    done = shoal.run(*words_of(shoal, mortal, "dp=2", **{"elastic.spares": 1}), environment=variables(), expect=2)
    assert "elastic.spares 1" in done.stderr and "have room for 2" in done.stderr


@pytest.mark.soak
def test_a_collective_that_fails_while_nobody_dies_is_done_again_and_counted(shoal, mortal):
    """One rank's connections end, as they do when a switch forgets them."""
    done, summary = check(shoal, mortal, "dp=2", "rank 1@5:start:hang-up", views=2)
    assert summary["elastic"]["retries"] == 1 and "a collective failed and nobody died" in done.stderr
    views = read_views(shoal)
    assert [view["retry"] for view in views] == [False, True] and views[0]["members"] == views[1]["members"]


def test_a_host_that_was_lost_comes_back_while_the_run_goes_on(shoal, mortal):
    """The other one waits for it, because two are asked for at least."""
    settings = {"elastic.rejoin": "true", "elastic.min_dp": 2}
    done, _ = check(shoal, mortal, "dp=2", "rank 1@5:microbatch:agent", views=2, **settings)
    assert "lost host localhost" in done.stderr and "host localhost has come" in done.stderr
    views = read_views(shoal)
    assert [view["hosts"] for view in views] == [list(HOSTS), list(HOSTS)]
    assert views[1]["members"][1] == "rank 1, start 2"
    assert not list((shoal.folder / "run").glob(".door-*")), "nothing is left of the way in"


@pytest.mark.soak
def test_a_host_that_is_new_in_the_host_file_takes_the_place_of_a_lost_one(shoal, mortal):
    file = shoal.folder / "hosts"
    file.write_text("".join(f"{host}:1\n" for host in HOSTS))
    words = words_of(shoal, mortal, "dp=2", steps=400, **{"elastic.rejoin": "true", "elastic.min_dp": 2})
    place = words.index("--hosts")
    words[place : place + 2] = ["--hostfile", file]
    process = shoal.start(*words, environment=variables("rank 1@300:microbatch:agent"))
    wait_for_step(shoal.folder / "run", 20)
    (shoal.folder / "localhost.down").touch()
    file.write_text("127.0.0.1:1\n127.0.0.2:1\n")
    _, stderr = process.communicate(timeout=100)
    assert process.returncode == 0 and "host 127.0.0.2 has come" in stderr, stderr
    assert [view["hosts"] for view in read_views(shoal)] == [list(HOSTS), ["127.0.0.1", "127.0.0.2"]]
    assert read_summary(shoal.folder / "run")["weights_sha256"] == undisturbed(shoal, mortal, "dp=2", steps=400)


@pytest.mark.soak
@pytest.mark.parametrize("zero", [0, 2])
def test_a_spare_on_a_third_host_takes_the_place_of_a_lost_one(shoal, mortal, zero):
    plan = f"dp=2 zero={zero}" if zero else "dp=2"
    words = words_of(shoal, mortal, plan, steps=700, **{"elastic.spares": 1})
    words[words.index("--hosts") + 1] += ",127.0.0.2:1"
    done = shoal.run(*words, environment=variables("rank 1@600:microbatch:agent"))
    views = read_views(shoal)
    assert [view["replicas"] for view in views[:2]] == [2, 2] and "127.0.0.2" in views[1]["hosts"], done.stderr
    assert read_summary(shoal.folder / "run")["weights_sha256"] == undisturbed(shoal, mortal, plan, steps=700)


@pytest.mark.soak
def test_a_host_that_is_not_there_at_the_start_comes_later(shoal, mortal):
    """Named behind those that are needed."""
    (shoal.folder / "127.0.0.2.down").touch()
    settings = {**SCALED, "elastic.max_dp": 3, "elastic.rejoin": "true"}
    words = words_of(shoal, mortal, "dp=2", steps=1500, **settings)
    words[words.index("--hosts") + 1] += ",127.0.0.2:1"
    process = shoal.start(*words, environment=variables())
    wait_for_step(shoal.folder / "run", 20)
    (shoal.folder / "127.0.0.2.down").unlink()
    _, stderr = process.communicate(timeout=100)
    assert process.returncode == 0 and "the run begins without it" in stderr, stderr
    assert [view["replicas"] for view in read_views(shoal)] == [2, 3], stderr
