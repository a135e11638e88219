"""Event lines are strict JSON whatever the numbers, and a torn file is continued on a line of its own."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.core.clock import Deadline
from shoal.core.events import Evaluated, Event, StepDone, Warned
from shoal.telemetry.eventlog import EventLog, append_event, encode_event


def test_line() -> None:
    line = encode_event(Warned(message="a\nb"), rank=3, wall_time=12.5)
    assert line.count(b"\n") == 1
    assert json.loads(line) == {"t": 12.5, "rank": 3, "kind": "warning", "message": "a\nb"}


def test_nan_is_valid_json() -> None:
    event = Evaluated(step=1, split="test", loss=float("nan"), accuracy=float("-inf"), samples=1, seconds=0.0)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    fields = json.loads(encode_event(event, rank=0, wall_time=0.0), parse_constant=refuse)
    assert float(fields["loss"]) != float(fields["loss"])
    assert float(fields["accuracy"]) == float("-inf")


def test_torn_line_is_ended(tmp_path: Path) -> None:
    path = tmp_path / "events/supervisor.jsonl"
    assert append_event(path, Warned(message="one"), rank=None)
    with path.open("ab") as file:
        file.write(b'{"t": 1, "ra')
    assert append_event(path, Warned(message="two"), rank=None)
    lines = path.read_text().splitlines()
    assert [json.loads(lines[index])["message"] for index in (0, 2)] == ["one", "two"]
    assert json.loads(lines[0])["rank"] is None


def test_disk_that_refuses(tmp_path: Path) -> None:
    (tmp_path / "events").write_text("in the way")
    assert not append_event(tmp_path / "events/supervisor.jsonl", Warned(message="one"), rank=None)
    full = tmp_path / "full"
    full.symlink_to("/dev/full")
    assert not append_event(full, Warned(message="one"), rank=None)


def step_done(step: int) -> StepDone:
    return StepDone(step=step, loss=2.5, lr=0.1, grad_norm=1.0, samples=4, tokens=8, seconds=0.5, data_seconds=0.1)


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    before = threading.enumerate()
    said: list[str] = []
    yield said
    alive = [thread.name for thread in threading.enumerate() if thread not in before]
    assert "event-log" not in alive, "a closed log has ended its thread"


def messages(run_dir: Path) -> list[str]:
    lines = (run_dir / "events/rank-000.jsonl").read_text().splitlines()
    return [json.loads(line)["message"] for line in lines]


def test_events_are_written_in_order(tmp_path: Path, warnings: list[str]) -> None:
    log = EventLog(tmp_path, 0, warn=warnings.append)
    for number in range(1000):
        log.write(Warned(message=str(number)))
    log.close()
    assert messages(tmp_path) == [str(number) for number in range(1000)]
    assert warnings == []


def test_events_reach_the_disk_while_the_run_goes_on(tmp_path: Path, warnings: list[str]) -> None:
    log = EventLog(tmp_path, 0, warn=warnings.append)
    log.write(Warned(message="now"))
    path = tmp_path / "events/rank-000.jsonl"
    deadline = Deadline(seconds=5)
    while not path.exists() or not path.read_bytes().endswith(b"\n"):
        deadline.check("the line")
        time.sleep(0.01)
    log.close()


def test_after_a_flush_everything_before_it_is_in_the_file(tmp_path: Path, warnings: list[str]) -> None:
    """Also what was written while the thread was at work: two hundred rounds leave it no quiet moment."""
    log = EventLog(tmp_path, 0, warn=warnings.append)
    for number in range(200):
        log.write(Warned(message=str(number)))
        log.flush()
        assert messages(tmp_path)[-1] == str(number)
    log.close()
    log.flush()


def test_resume_appends_and_ends_a_torn_line(tmp_path: Path, warnings: list[str]) -> None:
    path = tmp_path / "events/rank-000.jsonl"
    path.parent.mkdir()
    path.write_bytes(b'{"t": 1, "rank": 0, "kind": "warning", "mess')
    log = EventLog(tmp_path, 0, warn=warnings.append)
    log.write(Warned(message="after"))
    log.close()
    torn, whole = path.read_text().splitlines()
    assert torn.endswith('"mess')
    assert json.loads(whole)["message"] == "after"


class Stuck:
    """A sink that answers when it is let go."""

    def __init__(self) -> None:
        self.free = threading.Event()

    def write(self, event: Event, wall_time: float) -> None:
        self.free.wait(20)

    def close(self) -> None:
        pass


def test_full_queue_drops_and_never_blocks(tmp_path: Path, warnings: list[str]) -> None:
    stuck = Stuck()
    log = EventLog(tmp_path, 0, sinks=[lambda: stuck], capacity=100, warn=warnings.append)
    log.write(Warned(message="first"))
    deadline = Deadline(seconds=5)
    while log._queue:
        deadline.check("the writer to get stuck")
        time.sleep(0.01)
    for _ in range(10_000):  # one that waited would wait for ever: nobody frees the sink
        log.write(Warned(message="x"))
    assert log.dropped == 9_900
    stuck.free.set()
    log.close()
    assert len(messages(tmp_path)) == 101
    assert warnings == [f"9900 events were dropped and 0 lost from {tmp_path}/events/rank-000.jsonl"]


class Raising:
    def __init__(self, where: str) -> None:
        self.calls = 0
        if where == "init":
            raise ImportError("no such library")
        self.where = where

    def write(self, event: Event, wall_time: float) -> None:
        self.calls += 1
        if self.where == "write":
            raise RuntimeError("sink broke")

    def close(self) -> None:
        if self.where == "close":
            raise OSError("late")


@pytest.mark.parametrize("where", ["init", "write", "close"])
def test_sink_that_raises_is_let_go_and_said_once(tmp_path: Path, warnings: list[str], where: str) -> None:
    log = EventLog(tmp_path, 0, sinks=[lambda: Raising(where), lambda: Raising(where)], warn=warnings.append)
    for number in range(10):
        log.write(Warned(message=str(number)))
    log.close()
    assert len(messages(tmp_path)) == 10
    assert len(warnings) == 1
    assert "training goes on" in warnings[0]


def test_a_good_sink_gets_everything_beside_a_bad_one(tmp_path: Path, warnings: list[str]) -> None:
    good = Raising("never")
    log = EventLog(tmp_path, 0, sinks=[lambda: Raising("write"), lambda: good], warn=warnings.append)
    for number in range(10):
        log.write(Warned(message=str(number)))
    log.close()
    assert good.calls == 10


def test_full_disk(tmp_path: Path, warnings: list[str]) -> None:
    (tmp_path / "events").mkdir()
    (tmp_path / "events/rank-000.jsonl").symlink_to("/dev/full")
    log = EventLog(tmp_path, 0, warn=warnings.append)
    for number in range(10):
        log.write(Warned(message=str(number)))
    log.close()
    assert log.lost == 10
    assert "No space left on device" in warnings[0]
    assert len(warnings) == 2


def test_folder_that_cannot_be_made(tmp_path: Path, warnings: list[str]) -> None:
    (tmp_path / "events").write_text("in the way")
    log = EventLog(tmp_path, 0, warn=warnings.append)
    log.write(Warned(message="x"))
    log.close()
    assert log.lost == 1


def test_closed_file(tmp_path: Path, warnings: list[str]) -> None:
    log = EventLog(tmp_path, 0, warn=warnings.append)
    log.write(Warned(message="x"))
    deadline = Deadline(seconds=5)
    while log._file is None:
        deadline.check("the file")
        time.sleep(0.01)
    log._file.close()
    log.write(Warned(message="y"))
    log.close()
    assert log.lost >= 1
    assert "closed file" in warnings[0]


def test_field_that_is_no_data_is_written_as_text(tmp_path: Path, warnings: list[str]) -> None:
    log = EventLog(tmp_path, 0, warn=warnings.append)
    log.write(Warned(message=threading.Lock()))  # type: ignore[arg-type]
    log.close()
    assert log.lost == 0 and "lock" in (tmp_path / "events/rank-000.jsonl").read_text()


def test_of_steps_that_come_faster_than_they_are_looked_at_a_sink_gets_the_newest(tmp_path: Path) -> None:
    taken: list[Event] = []

    class Keep:
        def write(self, event: Event, wall_time: float) -> None:
            taken.append(event)

        def close(self) -> None:
            pass

    log = EventLog(tmp_path, 0, sinks=[Keep])
    events = [step_done(1), Warned(message="between"), step_done(2), step_done(3)]
    for event in events:
        log.write(event)
    log.close()
    assert taken == [events[1], events[3]]
    assert (tmp_path / "events/rank-000.jsonl").read_text().count("\n") == 4, "the file has them all"


def test_writing_after_close_is_counted(tmp_path: Path, warnings: list[str]) -> None:
    log = EventLog(tmp_path, 0, warn=warnings.append)
    log.close()
    log.write(Warned(message="late"))
    assert log.dropped == 1
