"""What the ends of all ranks amount to."""

from shoal.launch.outcome import GenerationEnd, Outcome, judge
from shoal.launch.verdict import RankEnd


def end(rank: int, exit_code: int | None, *sent: int, heard: int = 0, is_mute: bool = False) -> RankEnd:
    said = {0: "completed", 3: "interrupted"}.get(exit_code, "") if exit_code is not None and not is_mute else ""
    return RankEnd(
        rank=rank,
        exit_code=exit_code,
        ended_at=1.0,
        signals_sent=frozenset(sent),
        said=said,
        heard=heard,  # type: ignore[arg-type]
    )


def outcome(*ends: RankEnd, stop_signal: int | None = None) -> Outcome:
    return judge(GenerationEnd(ends=ends, stop_signal=stop_signal), restarts=2)


def test_completed() -> None:
    assert outcome(end(0, 0), end(1, 0)) == Outcome(status="completed", restarts=2)
    # A signal that came after the last step changes nothing about what was done.
    assert outcome(end(0, 0, 15), end(1, 0, 15), stop_signal=2).status == "completed"
    assert outcome(end(0, 0, 15), stop_signal=2).exit_code == 0


def test_interrupted() -> None:
    stopped = outcome(end(0, 3, 15), end(1, -15, 15), stop_signal=15)
    assert (stopped.status, stopped.exit_code, stopped.was_forced, stopped.culprit) == ("interrupted", 143, False, None)
    assert outcome(end(0, 3, 15), end(1, -9, 15, 9), stop_signal=2).was_forced
    assert outcome(end(0, 3), end(1, 3)).exit_code == 0


def test_a_signal_to_a_rank_alone_is_not_a_success() -> None:
    stopped = outcome(end(0, 3), end(1, 3, heard=15))
    assert (stopped.status, stopped.signalled_rank, stopped.exit_code) == ("interrupted", 1, 143)
    # It came after the last step.
    assert outcome(end(0, 0), end(1, 0, heard=15)).exit_code == 0


def test_an_exit_code_alone_completes_nothing() -> None:
    for code in (0, 3):
        failed = outcome(end(0, code), end(1, code, is_mute=True))
        assert (failed.status, failed.exit_code) == ("failed", 1)
        assert failed.culprit is not None and failed.culprit.rank == 1


def test_failure_while_stopping_stays_an_interruption_with_a_culprit() -> None:
    stopped = outcome(end(0, 3, 15), end(1, 1, 15), stop_signal=2)
    assert (stopped.status, stopped.exit_code) == ("interrupted", 130)
    assert stopped.culprit is not None
    assert stopped.culprit.rank == 1


def test_failed() -> None:
    failed = outcome(end(0, -9, 9), end(1, 1))
    assert (failed.status, failed.exit_code, failed.restarts) == ("failed", 1, 2)
    # One rank stopped in order and another did not: that is a failure, whoever spoke first.
    assert outcome(end(0, 3), end(1, 1)).status == "failed"
