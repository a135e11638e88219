"""The last words of a failed run, for each kind of failure."""

import dataclasses
import signal
from typing import Any

from shoal.launch.blame import Culprit
from shoal.launch.errorreport import ErrorReport
from shoal.launch.failurereport import describe, headline

REPORT = ErrorReport(
    rank=1,
    step=12,
    phase="backward",
    type="ValueError",
    message="bad shape",
    traceback="Traceback (most recent call last):\n  ...\nValueError: bad shape\n",
    peer_failure=False,
    time=1.0,
    exit="run",
)


def culprit(**values: Any) -> Culprit:
    usual: dict[str, Any] = {
        "rank": 1,
        "step": 12,
        "phase": "backward",
        "kind": "exception",
        "cause": "ValueError: bad shape",
    }
    return Culprit(**{**usual, **values})


def killed(number: int, **values: Any) -> str:
    return describe(culprit(kind="signal", cause="killed", signal=number, **values))


def test_headline() -> None:
    assert headline(culprit()) == "rank 1 failed at step 12 in phase 'backward': ValueError: bad shape"
    assert headline(culprit(phase="", step=0)) == "rank 1 failed before its first phase: ValueError: bad shape"


def test_exception_has_its_traceback_and_the_log() -> None:
    text = describe(culprit(report=REPORT, log="runs/a/logs/rank-001.log", others=("rank 0 was stopped",)))
    assert (
        "ValueError: bad shape\n\nrank 0 was stopped\n\ntry: read all that rank 1 printed: runs/a/logs/rank-001.log"
        in text
    )
    assert "Traceback (most recent call last)" in text


def test_foreseen_failure_has_no_traceback_unless_asked() -> None:
    report = dataclasses.replace(REPORT, type="shoal.core.errors.RunError")
    assert "Traceback" not in describe(culprit(report=report))
    assert "Traceback" in describe(culprit(report=report), debug=True)


def test_wrong_request_is_its_message() -> None:
    report = dataclasses.replace(REPORT, exit="request")
    assert describe(culprit(report=report, exit_code=2)) == "bad shape"
    assert "Traceback" in describe(culprit(report=report, exit_code=2), debug=True)


def test_sigkill_with_and_without_the_out_of_memory_killer() -> None:
    text = killed(signal.SIGKILL, resident_bytes=3 << 30)
    assert "SIGKILL was not sent by Shoal" in text
    assert "last known memory of rank 1: 3.0 GiB of this machine's" in text
    text = killed(signal.SIGKILL, oom_kills=2)
    assert "out-of-memory killer struck 2 time(s)" in text
    assert "train.micro_batch" in text


def test_other_signals() -> None:
    text = killed(signal.SIGSEGV, tail="Fatal Python error: Segmentation fault")
    assert "native code crashed" in text
    assert "    Fatal Python error: Segmentation fault" in text
    assert "/dev/shm" in killed(signal.SIGBUS)
    assert "scheduler" in killed(signal.SIGTERM)


def test_hang() -> None:
    assert "SIGSTOP" in describe(culprit(kind="hang", cause="no sign of life for 31 s, the process is stopped"))
    assert "elastic.heartbeat_deadline" in describe(culprit(kind="hang", cause="no sign of life for 31 s"))


def test_a_stack_is_spoken_of_only_where_there_is_one() -> None:
    shown = 'Current thread 0x00007f (most recent call first):\n  File "mine.py", line 3 in forward'
    assert "its stack is above" in describe(culprit(kind="hang", cause="it hangs", tail=shown))
    told = describe(culprit(kind="hang", cause="it hangs", tail="a warning"))
    assert "its stack is above" not in told and "it printed none" in told
