"""Blame, as a table: how the ranks ended, and who is named."""

import signal
from typing import Any

from shoal.launch.blame import Culprit, GenerationEnd, Outcome, RankEnd, blame, judge, name_signal
from shoal.launch.errorreport import ErrorReport
from shoal.launch.hangs import Hang


def report(rank: int, *, at: float, peer: bool = False, exit: str = "run", kind: str = "ValueError") -> ErrorReport:
    return ErrorReport(
        rank=rank,
        step=5,
        phase="forward",
        type=kind,
        message="boom",
        traceback="Traceback ...",
        peer_failure=peer,
        time=at,
        exit=exit,
    )


def end(rank: int, exit_code: int | None, *, at: float = 10.0, **more: Any) -> RankEnd:
    return RankEnd(rank=rank, exit_code=exit_code, ended_at=at, step=4, phase=more.pop("phase", "wait: x"), **more)


def killed_by_us(rank: int, phase: str = "wait: x", **more: Any) -> RankEnd:
    return end(rank, -9, at=99.0, phase=phase, signals_sent=frozenset({9}), **more)


def culprit(*ends: RankEnd, hang: Hang | None = None) -> Culprit:
    found = blame(ends, hang=hang)
    assert found is not None
    return found


def test_nobody() -> None:
    assert blame([end(0, 0, final_status="completed"), end(1, 3, final_status="interrupted")]) is None
    assert blame([killed_by_us(0), end(1, -15, signals_sent=frozenset({15}))]) is None


def test_who_leaves_without_a_word_is_named_and_not_who_lost_it() -> None:
    lost = end(0, 1, at=1.0, report=report(0, at=1.0, peer=True))
    found = culprit(lost, end(1, 0, at=2.0, last_step=40))
    assert (found.rank, found.kind, found.exit_code) == (1, "exit", 1)
    assert found.cause.startswith("it left with exit code 0 before step 40, the last, was done")
    # The word of one who did other than it said is worth nothing either.
    assert culprit(end(0, 0, final_status="interrupted")).cause.startswith(
        "it left with exit code 0 without having finished"
    )


def test_foreign_signal_before_everything() -> None:
    found = culprit(end(0, 1, at=1.0, report=report(0, at=1.0)), end(1, -9, at=2.0), killed_by_us(2))
    assert (found.rank, found.kind, found.cause, found.signal) == (1, "signal", "killed by signal 9 (SIGKILL)", 9)
    assert (found.step, found.phase) == (4, "wait: x")


def test_two_foreign_signals_by_time() -> None:
    assert culprit(end(0, -11, at=3.0), end(1, -9, at=2.0)).rank == 1


def test_abort_is_often_a_consequence_so_the_earlier_exception_wins() -> None:
    assert culprit(end(0, -signal.SIGABRT, at=2.0), end(1, 1, at=2.5, report=report(1, at=1.0))).rank == 1
    assert culprit(end(0, -signal.SIGABRT, at=1.0), end(1, 1, at=2.5, report=report(1, at=2.0))).rank == 0


def test_exception_before_consequences_whatever_their_time() -> None:
    found = culprit(end(0, 1, at=1.0, report=report(0, at=1.0, peer=True)), end(1, 1, at=2.0, report=report(1, at=1.9)))
    assert (found.rank, found.kind, found.cause) == (1, "exception", "ValueError: boom")
    assert (found.step, found.phase) == (5, "forward")  # as the rank itself said


def test_first_of_equal_exceptions_and_the_other_is_mentioned() -> None:
    found = culprit(end(0, 1, at=3.0, report=report(0, at=2.0)), end(1, 1, at=2.5, report=report(1, at=1.0)))
    assert found.rank == 1
    assert found.others == ("rank 0 was at step 4 in phase 'wait: x' and failed too: ValueError: boom",)


def test_clock_that_jumped_forward_does_not_acquit() -> None:
    assert culprit(end(0, 1, at=1.0, report=report(0, at=1e9)), end(1, 1, at=2.0, report=report(1, at=2.0))).rank == 0


def test_others_waited_in_vain_for_one_that_still_ran() -> None:
    peers = [end(0, 1, report=report(0, at=1.0, peer=True)), end(2, 1, report=report(2, at=1.1, peer=True))]
    found = culprit(peers[0], killed_by_us(1, phase="forward"), peers[1])
    assert (found.rank, found.kind) == (1, "hang")
    assert found.others[0].endswith("failed in consequence: ValueError: boom")


def test_only_consequences_name_the_first() -> None:
    assert culprit(killed_by_us(0), end(1, 1, report=report(1, at=1.0, peer=True))).rank == 1


def test_hang_that_the_watch_found() -> None:
    hang = Hang(rank=1, reason="no sign of life for 31.0 s")
    found = culprit(end(0, 1, report=report(0, at=1.0)), killed_by_us(1, phase="forward"), hang=hang)
    assert (found.rank, found.kind, found.cause, found.phase) == (1, "hang", hang.reason, "forward")


def test_wrong_request_is_exit_2_and_cannot_restart() -> None:
    found = culprit(end(0, 2, report=report(0, at=1.0, exit="request", kind="shoal.core.errors.RequestError")))
    assert (found.exit_code, found.can_restart, found.cause) == (2, False, "boom")


def test_what_would_end_the_same_again_is_exit_1_and_cannot_restart() -> None:
    found = culprit(end(0, 1, report=report(0, at=1.0, exit="final", kind="shoal.core.errors.FinalError")))
    assert (found.exit_code, found.can_restart, found.cause) == (1, False, "boom")
    assert culprit(end(0, 1, report=report(0, at=1.0))).can_restart


def test_exit_without_report_and_process_that_would_not_die() -> None:
    assert culprit(end(0, 7), killed_by_us(1)).cause == "exit code 7, without a report"
    assert blame([end(0, None)]) is None


def test_signal_names() -> None:
    assert name_signal(15) == "signal 15 (SIGTERM)"
    assert name_signal(63) == "signal 63"


def ended(rank: int, exit_code: int | None, *sent: int, stop_signal: int = 0, is_mute: bool = False) -> RankEnd:
    said = {0: "completed", 3: "interrupted"}.get(exit_code, "") if exit_code is not None and not is_mute else ""
    return RankEnd(
        rank=rank,
        exit_code=exit_code,
        ended_at=1.0,
        signals_sent=frozenset(sent),
        final_status=said,
        stop_signal=stop_signal,  # type: ignore[arg-type]
    )


def outcome(*ends: RankEnd, stop_signal: int | None = None) -> Outcome:
    return judge(GenerationEnd(ends=ends, stop_signal=stop_signal), restarts=2)


def test_completed() -> None:
    assert outcome(ended(0, 0), ended(1, 0)) == Outcome(status="completed", restarts=2)
    # A signal that came after the last step changes nothing about what was done.
    assert outcome(ended(0, 0, 15), ended(1, 0, 15), stop_signal=2).status == "completed"
    assert outcome(ended(0, 0, 15), stop_signal=2).exit_code == 0


def test_interrupted() -> None:
    stopped = outcome(ended(0, 3, 15), ended(1, -15, 15), stop_signal=15)
    assert (stopped.status, stopped.exit_code, stopped.was_forced, stopped.culprit) == ("interrupted", 143, False, None)
    assert outcome(ended(0, 3, 15), ended(1, -9, 15, 9), stop_signal=2).was_forced
    assert outcome(ended(0, 3), ended(1, 3)).exit_code == 0


def test_a_signal_to_a_rank_alone_is_not_a_success() -> None:
    stopped = outcome(ended(0, 3), ended(1, 3, stop_signal=15))
    assert (stopped.status, stopped.signalled_rank, stopped.exit_code) == ("interrupted", 1, 143)
    # It came after the last step.
    assert outcome(ended(0, 0), ended(1, 0, stop_signal=15)).exit_code == 0


def test_an_exit_code_alone_completes_nothing() -> None:
    for code in (0, 3):
        failed = outcome(ended(0, code), ended(1, code, is_mute=True))
        assert (failed.status, failed.exit_code) == ("failed", 1)
        assert failed.culprit is not None and failed.culprit.rank == 1


def test_failure_while_stopping_stays_an_interruption_with_a_culprit() -> None:
    stopped = outcome(ended(0, 3, 15), ended(1, 1, 15), stop_signal=2)
    assert (stopped.status, stopped.exit_code) == ("interrupted", 130)
    assert stopped.culprit is not None
    assert stopped.culprit.rank == 1


def test_failed() -> None:
    failed = outcome(ended(0, -9, 9), ended(1, 1))
    assert (failed.status, failed.exit_code, failed.restarts) == ("failed", 1, 2)
    # One rank stopped in order and another did not: that is a failure, whoever spoke first.
    assert outcome(ended(0, 3), ended(1, 1)).status == "failed"
