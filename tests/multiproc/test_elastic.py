"""Runs that go on when ranks die (``elastic.mode = "shrink"``): real processes, killed at chosen points.

Every run must end in the weights of the run that nobody disturbed, to the bit.
"""

import json
import os
import signal

import pytest

from shoal.telemetry.summaryfile import read_summary
from support.processes.command import ROOT, TINY, ranks_of, read_events, wait_for_step, wait_until

DEATHS = 'callbacks = ["support.elastic.deaths:Deaths"]\n'


@pytest.fixture
def mortal(shoal):
    """A recipe whose ranks die where a test says."""
    path = shoal.folder / "mortal.toml"
    path.write_text(DEATHS + TINY.replace("every = 3", "every = 0"))
    return path


_UNDISTURBED = {}


def train(shoal, recipe, name, plan, *, deaths="", steps=12, expect=0, mode="shrink", **settings):
    changes = {"train.steps": steps, **({"elastic.mode": mode} if mode else {}), **settings}
    words = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    path = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    done = shoal.run(
        "train", recipe, "--plan", plan, "--run-dir", name, *words, expect=expect,
        environment={"DEATHS": deaths, "PYTHONPATH": path},
    )  # fmt: skip
    return done, read_summary(shoal.folder / name)


def read_views(shoal):
    """The views that the supervisor published."""
    lines = (shoal.folder / "run" / "events" / "supervisor.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == "view"]


def undisturbed(shoal, recipe, plan, steps=12):
    """The hash of the weights that the plan comes to when nobody dies, by the mode that knows nothing of elastic runs."""
    key = (plan, steps)
    if key not in _UNDISTURBED:
        _, summary = train(shoal, recipe, "undisturbed", plan, steps=steps, mode="")
        _UNDISTURBED[key] = summary["weights_sha256"]
    return _UNDISTURBED[key]


def check(shoal, recipe, plan, deaths, *, views, steps=12, **settings):
    done, summary = train(shoal, recipe, "run", plan, deaths=deaths, steps=steps, **settings)
    assert summary["status"] == "completed" and summary["steps"] == steps
    assert summary["weights_sha256"] == undisturbed(shoal, recipe, plan, steps), done.stderr
    assert summary["elastic"]["views"] == views, done.stderr
    return done, summary


def test_a_killed_rank_is_done_without_and_every_bit_stays(shoal, mortal):
    done, summary = check(shoal, mortal, "dp=2", "rank 1@5:gradients", views=2)
    assert "lost rank 1" in done.stderr and "SIGKILL" in done.stderr
    assert not list((shoal.folder / "run" / "checkpoints").glob("step-*[1-9]"))[:-1], "no checkpoint was needed"
    assert summary["elastic"]["steps_redone"] >= 1 and summary["elastic"]["paused_seconds"] < 10
    resumed = read_events(shoal.folder / "run", 0, "resumed")
    assert [(event["epoch"], event["source"]) for event in resumed] == [(2, "own")]
    steps = [event["step"] for event in read_events(shoal.folder / "run", 0, "step")]
    assert sorted(set(steps)) == list(range(1, 13))


POINTS = ("start", "microbatch", "gradients", "update")


@pytest.mark.soak
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_may_die_anywhere_in_a_step(shoal, mortal, zero, point, rank):
    plan = f"dp=2 zero={zero}" if zero else "dp=2"
    check(shoal, mortal, plan, f"rank {rank}@5:{point}", views=2)


@pytest.mark.soak
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_four_become_three_become_one(shoal, mortal, zero):
    plan = f"dp=4 zero={zero}" if zero else "dp=4"
    # With copies in one peer's memory two neighbours that die at once would take a shard with them.
    deaths = "rank 1@4:microbatch;rank 0@7:update;rank 3@9:start"
    check(shoal, mortal, plan, deaths, views=4)


@pytest.mark.soak
def test_two_ranks_die_in_the_same_step(shoal, mortal):
    done, summary = train(shoal, mortal, "run", "dp=4", deaths="rank 0@6:microbatch;rank 2@6:microbatch")
    assert summary["weights_sha256"] == undisturbed(shoal, mortal, "dp=4"), done.stderr


@pytest.mark.soak
@pytest.mark.parametrize("zero", [0, 2])
@pytest.mark.parametrize("point", ["gradients", "update"])
def test_another_rank_dies_in_the_first_step_of_a_view(shoal, mortal, zero, point):
    """Without ZeRO nothing of the view before is kept by then; with it the old cut is, until all have taken a step."""
    plan = f"dp=4 zero={zero}" if zero else "dp=4"
    # The sum of the first try is never made, so who dies after it dies in the redone step.
    check(shoal, mortal, plan, f"rank 1@5:start;rank 3@5:{point}", views=3)


@pytest.mark.soak
@pytest.mark.parametrize("zero", [0, 2])
def test_those_who_died_come_back_between_two_steps(shoal, mortal, zero):
    plan = f"dp=4 zero={zero}" if zero else "dp=4"
    settings = {"elastic.rejoin": "true"}
    done, summary = train(
        shoal, mortal, "run", plan, deaths="rank 1@4:microbatch;rank 0@6:update;rank 3@6:start", steps=150, **settings
    )
    assert summary["weights_sha256"] == undisturbed(shoal, mortal, plan, steps=150), done.stderr
    views = read_views(shoal)
    assert views[-1]["replicas"] == 4 and min(view["replicas"] for view in views) < 4, views


@pytest.mark.parametrize("point", ["connect", pytest.param("torn", marks=pytest.mark.soak)])
def test_a_rank_may_die_while_the_ranks_of_a_view_connect(shoal, mortal, point):
    """One who has told its address and never connects, or has told half of it, is not waited for."""
    _, summary = check(shoal, mortal, "dp=4", f"rank 1@5:microbatch;rank 2@2:{point}", views=2)
    assert summary["elastic"]["paused_seconds"] < 10, "gloo alone waits for lease_seconds + 5"


SCALED = {"train.micro_batch": 2, "optim.scale": "linear", "optim.scale_base": 4, "elastic.batch": "scale"}


def test_a_batch_that_follows_the_replicas_is_that_of_a_schedule(shoal, mortal):
    """Four steps of 8 samples by two replicas, then steps of 4 by one, at half the rate: to the bit what a run comes to whose
    batch was to change at that step."""
    _, scaled = train(shoal, mortal, "run", "dp=2", deaths="rank 1@5:microbatch", **SCALED)
    rate = {key: value for key, value in SCALED.items() if key != "elastic.batch"}
    schedule = {"train.batch_schedule": "[[0, 8], [4, 4]]", **rate}
    train(shoal, mortal, "other", "dp=2", steps=4, mode="", **schedule)
    words = [word for key, value in {"train.steps": 12, **schedule}.items() for word in ("--set", f"{key}={value}")]
    shoal.run("train", mortal, "--plan", "dp=1", "--run-dir", "other", "--resume", *words,
              environment={"PYTHONPATH": str(ROOT / "tests")})  # fmt: skip
    assert scaled["weights_sha256"] == read_summary(shoal.folder / "other")["weights_sha256"]
    events = {event["step"]: event for event in read_events(shoal.folder / "run", 0, "step")}
    assert [events[step]["samples"] for step in (4, 5, 12)] == [8, 4, 4]
    assert events[5]["lr"] == events[4]["lr"] / 2 and scaled["elastic"]["views"] == 2


@pytest.mark.parametrize(
    ("plan", "limit", "deaths"),
    [
        ("dp=4", 2, "rank 1@5:microbatch"),
        pytest.param("dp=8 zero=2", 3, "rank 0@5:update;rank 2@8:gradients", marks=pytest.mark.soak),
        pytest.param("dp=4 tp=2", 2, "rank 1@5:microbatch", marks=pytest.mark.soak),
    ],
)
def test_fewer_replicas_than_logical_ones_from_the_start(shoal, mortal, plan, limit, deaths):
    done, _ = check(shoal, mortal, plan, deaths, views=1 + deaths.count("@"), **{"elastic.max_dp": limit})
    assert [view["replicas"] for view in read_views(shoal)][:2] == [limit, limit - 1], done.stderr


@pytest.mark.soak
def test_a_scaled_run_grows_beyond_its_plan(shoal, mortal):
    settings = {**SCALED, "elastic.max_dp": 3, "elastic.rejoin": "true"}
    _, summary = train(shoal, mortal, "run", "dp=2", steps=400, **settings)
    assert summary["status"] == "completed" and read_views(shoal)[-1]["replicas"] == 3
    samples = [event["samples"] for event in read_events(shoal.folder / "run", 0, "step")]
    assert set(samples) == {8, 12} and samples == sorted(samples)


@pytest.mark.soak
@pytest.mark.parametrize("drops", ["true", "false"])
def test_a_rank_that_computes_for_longer_is_named_and_left_out_where_that_is_asked(shoal, mortal, drops):
    settings = {"elastic.drop_stragglers": drops, "elastic.straggler_factor": 2}
    done, summary = train(shoal, mortal, "run", "dp=2", deaths="rank 1@0:microbatch:burn", steps=150, **settings)
    assert "a straggler on" in done.stderr and "rank 1 is busy" in done.stderr and "(compute: +" in done.stderr
    assert [view["replicas"] for view in read_views(shoal)] == ([2, 1] if drops == "true" else [2])
    assert summary["weights_sha256"] == undisturbed(shoal, mortal, "dp=2", steps=150), done.stderr


@pytest.mark.soak
def test_a_spare_takes_the_place_of_a_dead_rank(shoal, mortal):
    settings = {"elastic.spares": 1}
    done, summary = train(shoal, mortal, "run", "dp=2", deaths="rank 1@60:microbatch", steps=120, **settings)
    assert summary["weights_sha256"] == undisturbed(shoal, mortal, "dp=2", steps=120), done.stderr
    views = read_views(shoal)
    assert [view["replicas"] for view in views] == [2, 2], "it took the place in the same view"


@pytest.mark.soak
def test_a_spare_does_not_keep_a_run_that_is_stopped(shoal, mortal):
    words = ["--set", "train.steps=100000", "--set", "elastic.mode=shrink", "--set", "elastic.spares=1"]
    path = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    process = shoal.start(
        "train", mortal, "--plan", "dp=2", "--run-dir", "run", *words, environment={"PYTHONPATH": path}
    )
    wait_until(lambda: len(ranks_of(process)) == 3, "two ranks and a spare")
    wait_for_step(shoal.folder / "run", 20)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=30)  # elastic.stop_grace is 60 s
    assert process.returncode == 143 and "killed" not in stderr, stderr
    assert read_summary(shoal.folder / "run")["status"] == "interrupted"


@pytest.mark.soak
def test_a_rank_that_hangs_is_ended_and_done_without(shoal, mortal):
    settings = {"elastic.heartbeat_deadline": 2}
    done, _ = check(shoal, mortal, "dp=2", "rank 0@5:microbatch:stop", views=2, **settings)
    assert "it hung: no sign of life" in done.stderr


@pytest.mark.soak
def test_without_copies_the_newest_checkpoint_is_read_in_the_same_process(shoal, mortal):
    settings = {"elastic.copies": 0, "checkpoint.every": 3}
    done, summary = train(shoal, mortal, "run", "dp=2 zero=2", deaths="rank 1@8:microbatch", **settings)
    assert summary["weights_sha256"] == undisturbed(shoal, mortal, "dp=2 zero=2"), done.stderr
    assert [event["source"] for event in read_events(shoal.folder / "run", 0, "resumed")] == ["checkpoint"]


@pytest.mark.soak
def test_a_replica_of_several_ranks_is_lost_as_one(shoal, mortal):
    done, _ = check(shoal, mortal, "dp=2 tp=2", "rank 1@5:microbatch", views=2)
    assert "lost rank 0" in done.stderr and "lost rank 1" in done.stderr


@pytest.mark.soak
@pytest.mark.parametrize(("rank", "point"), [(0, "evaluation"), (1, "save"), (0, "save")])
def test_a_rank_may_die_between_steps(shoal, mortal, rank, point):
    settings = {"checkpoint.every": 3, "eval.every": 3}
    check(shoal, mortal, "dp=2", f"rank {rank}@6:{point}", views=2, **settings)
    saved = read_events(shoal.folder / "run", 0, "checkpoint_saved")
    assert saved[-1]["step"] == 12


@pytest.mark.soak
def test_with_fewer_than_min_dp_the_run_fails_and_says_why(shoal, mortal):
    settings = {"elastic.min_dp": 2}
    done, summary = train(shoal, mortal, "run", "dp=2", deaths="rank 1@5:microbatch", expect=1, **settings)
    assert "1 of 2 replicas are left, and elastic.min_dp is 2" in done.stderr
    assert summary["status"] == "failed"


@pytest.mark.parametrize(
    ("plan", "setting", "said"),
    [
        ("dp=2 pp=2", "elastic.copies=1", "under pp=2"),
        ("dp=2 compress=int8", "elastic.copies=1", "under compress=int8"),
        ("dp=2", "optim.adapt=noise", "optim.adapt noise"),
        ("dp=2", "elastic.batch=scale", "optim.scale is none"),
    ],
)
def test_what_cannot_shrink_is_refused_before_a_process_starts(shoal, mortal, plan, setting, said):
    words = ["--set", "elastic.mode=shrink", "--set", setting]
    done = shoal.run("train", mortal, "--plan", plan, "--run-dir", "run", *words, expect=2,
                     environment={"PYTHONPATH": str(ROOT / "tests")})  # fmt: skip
    assert said in done.stderr
