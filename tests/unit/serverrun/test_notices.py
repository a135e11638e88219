"""What servers write down for people is told once, by whoever says it first, and counted."""

import pytest

from shoal.core.events import GradientRefused, RunEnded, WentBack, WorkerHung
from shoal.core.rundir import RunDir
from shoal.serverrun.notices import Notices, count_notices, describe_rollback
from shoal.telemetry.eventlog import append_event


def write(run_dir, rank, *events):
    for event in events:
        assert append_event(RunDir(run_dir).events(rank), event, rank=rank)


def refused(number):
    return GradientRefused(step=4, worker="worker-1", push=f"abc/{number}", reason=f"NaN in number {number}")


def back(history, step):
    return WentBack(step=step, died=("server-0", "server-1"), history=history)


def test_what_two_servers_say_is_told_once_and_what_is_half_written_later(tmp_path):
    write(tmp_path, 0, refused(0))
    notices = Notices(tmp_path)
    assert notices.look() == [], "that was told by whoever ran before"
    write(tmp_path, 0, refused(1), RunEnded(status="completed", step=3, seconds=1.0))
    write(tmp_path, 1, refused(1), refused(2))
    assert [line.rpartition(" ")[2] for line in notices.look()] == ["1", "2"]
    path = RunDir(tmp_path).events(1)
    write(tmp_path, 1, back(1, 5))
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert notices.look() == []
    path.write_bytes(whole)
    assert notices.look() == [
        "server-0 and server-1 died, and no copy of a shard was left: everyone went back to the checkpoint of step 5"
    ]
    assert notices.look() == []


@pytest.mark.parametrize(
    ("died", "step", "says"),
    [
        (
            ("server-1",),
            0,
            "server-1 died, and no copy of a shard was left: everyone went back to the beginning, for there",
        ),
        (
            ("a", "b", "c"),
            20,
            "a, b and c died, and no copy of a shard was left: everyone went back to the checkpoint of step 20",
        ),
        ((), 5, "servers died, and no copy"),
    ],
)
def test_who_died_is_named_however_many(died, step, says):
    assert describe_rollback(WentBack(step=step, died=died, history=1).as_dict()).startswith(says)


def test_the_summary_counts_gradients_and_returns_and_not_those_who_tell_of_them(tmp_path):
    hung = WorkerHung(worker="worker-0", step=2, seconds=61.0, usual_seconds=0.1)
    write(tmp_path, 0, refused(0), back(1, 5), back(2, 10))
    write(tmp_path, 1, refused(0), refused(1), back(1, 5))
    write(tmp_path, 2, hung)
    with RunDir(tmp_path).events(1).open("ab") as file:
        file.write(b'{"t": 1.0, "kind": "went_back", "his')
    assert count_notices(tmp_path) == {"not_finite": 2, "went_back": 2, "hung": 1}
