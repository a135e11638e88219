"""What prune takes and what it leaves: conditions as a table, and removal of folders that are forged, linked or locked."""

import fcntl
import os

import pytest

from shoal.core.errors import RequestError
from shoal.dashboard.cleanup.choice import Conditions, OldRun, choose
from shoal.dashboard.cleanup.removal import is_locked, remove_run, size_of, why_no_run

DAY = 86400.0
NOW = 100 * DAY


def old(name: str, *, days: float = 50, status: str = "completed", is_locked: bool = False) -> OldRun:
    return OldRun(name=name, status=status, is_locked=is_locked, updated=NOW - days * DAY, num_bytes=1)


RUNS = [
    old("ancient", days=90),
    old("failed-old", days=60, status="failed"),
    old("failed-new", days=1, status="failed"),
    old("running", days=80, status="running"),
    old("silent", days=80, status="silent"),
    old("held", days=80, is_locked=True),
    old("fresh", days=2),
]


@pytest.mark.parametrize(
    ("conditions", "goes"),
    [
        (Conditions(older_seconds=30 * DAY), {"ancient", "failed-old"}),
        (Conditions(older_seconds=90 * DAY), {"ancient"}),
        (Conditions(statuses=("failed",)), {"failed-old", "failed-new"}),
        (Conditions(statuses=("failed",), older_seconds=30 * DAY), {"failed-old"}),
        (Conditions(keep=2), {"ancient", "failed-old"}),
        (Conditions(keep=0), {"ancient", "failed-old", "failed-new", "fresh"}),
        (Conditions(keep=100), set()),
        (Conditions(names="failed"), {"failed-old", "failed-new"}),
        (Conditions(names="failed", keep=1), {"failed-old"}),
        (Conditions(older_seconds=0.0), {"ancient", "failed-old", "failed-new", "fresh"}),
    ],
)
def test_every_condition_has_to_hold(conditions, goes):
    outcomes = choose(RUNS, conditions, NOW)
    assert {outcome.run.name for outcome in outcomes if outcome.goes} == goes
    assert [outcome.run.name for outcome in outcomes] == sorted(
        (run.name for run in RUNS), key=lambda name: next((run.updated, name) for run in RUNS if run.name == name)
    )
    reasons = {outcome.run.name: outcome.reason for outcome in outcomes}
    assert reasons["held"] == "in use by a process" and reasons["running"] == "its status is running"


def test_a_run_of_the_future_stays():
    assert not choose([old("early", days=-1)], Conditions(keep=0), NOW)[0].goes


def test_without_a_condition_nothing_is_chosen():
    with pytest.raises(RequestError, match="every run"):
        choose(RUNS, Conditions(), NOW)


def make_run(path):
    (path / "events").mkdir(parents=True)
    (path / "events" / "rank-000.jsonl").write_text("{}\n")
    (path / "recipe.toml").write_text("")
    (path / "checkpoints" / "step-00000001").mkdir(parents=True)
    (path / "checkpoints" / "step-00000001" / "rank-000.safetensors").write_bytes(b"x" * 10_000)
    return path


def test_a_run_is_removed_whole(tmp_path):
    run = make_run(tmp_path / "run")
    assert size_of(run) >= 10_000
    assert remove_run(run) == "" and not run.exists()


def test_what_is_not_a_run_stays(tmp_path):
    for name in ("recipe.toml", "events"):
        path = make_run(tmp_path / f"without {name}")
        (path / name).rename(tmp_path / f"moved {name}")
        # A link to what belongs to another run makes no run of this folder.
        (path / name).symlink_to(tmp_path / f"moved {name}")
        assert "own" in remove_run(path) and (path / "checkpoints" / "step-00000001").exists()
    (tmp_path / "file").write_text("")
    assert why_no_run(tmp_path / "file") and why_no_run(tmp_path / "nothing")


def test_a_link_to_a_run_is_not_followed(tmp_path):
    run = make_run(tmp_path / "elsewhere")
    link = tmp_path / "link"
    link.symlink_to(run)
    assert remove_run(link) == "a link or a file, no folder" and link.is_symlink()
    assert (run / "recipe.toml").exists()


def test_a_link_inside_goes_and_what_it_leads_to_stays(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("kept")
    run = make_run(tmp_path / "run")
    (run / "checkpoints" / "step-00000002").symlink_to(outside)
    (run / "traces").symlink_to(outside, target_is_directory=True)
    (run / "plan.json").symlink_to(outside / "precious")
    os.mkfifo(run / "fifo")
    assert remove_run(run) == "" and not run.exists()
    assert (outside / "precious").read_text() == "kept"


def test_a_run_that_is_held_stays_whole(tmp_path):
    run = make_run(tmp_path / "run")
    assert not is_locked(run)
    with (run / "run.lock").open("w") as lock:
        lock.write("12345\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert is_locked(run)
        assert remove_run(run) == "in use by process 12345"
        assert (run / "run.lock").read_text() == "12345\n" and (run / "recipe.toml").exists()
    assert not is_locked(run)
    assert (run / "run.lock").read_text() == "12345\n", "looking changes nothing"


def test_a_lock_that_is_a_link_is_taken_for_one_that_is_held(tmp_path):
    run = make_run(tmp_path / "run")
    (tmp_path / "target").write_text("")
    (run / "run.lock").symlink_to(tmp_path / "target")
    assert is_locked(run) and "lock" in remove_run(run) and (run / "recipe.toml").exists()


def test_what_cannot_be_removed_is_named_and_the_run_can_be_recognised_afterwards(tmp_path):
    run = make_run(tmp_path / "run")
    deep = run / "traces"
    for _ in range(40):
        deep = deep / "x"
    deep.mkdir(parents=True)
    assert "deeper than a run goes" in remove_run(run)
    assert not why_no_run(run) or (run / "traces").exists()
