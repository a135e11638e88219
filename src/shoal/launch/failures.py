"""What a rank says of its own failure, and whether that was its own: the process boundary of every kind of rank."""

import sys
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from shoal.comm.channel import PeerLost
from shoal.core.errors import RunError
from shoal.core.functions import place_of
from shoal.launch.environments import read_place
from shoal.launch.errorreport import ErrorReport, write_report
from shoal.telemetry.statusboard import StatusBoard, StatusReading


def report_failure(
    run_dir: Path, error: BaseException, environment: Mapping[str, str], *, state: StatusReading | None = None
) -> None:
    """Put down what this rank knows of its failure, where the supervisor looks for it."""
    error = explain_exit(error)
    place = read_place(environment)
    if state is None and "SHOAL_BOARD_FD" in environment:
        state = StatusBoard.attach(int(environment["SHOAL_BOARD_FD"]), place.world_size).of_rank(place.rank).read()
    step, phase = (state.step, state.phase) if state is not None else (0, "")
    report = ErrorReport.of(error, rank=place.rank, step=step, phase=phase, peer_failure=is_peer_failure(error))
    try:
        write_report(run_dir, report)
    except OSError as refusal:
        # A full disk must not keep the failure report from being seen, nor this process from ending.
        print(f"cannot write the error report: {refusal}\n{report.traceback}", file=sys.stderr)


def explain_exit(error: BaseException) -> BaseException:
    """An exit as an error that says what left, and from where; every other error as it is."""
    if not isinstance(error, SystemExit):
        return error
    told = RunError(f"it left: something that it runs called sys.exit({error.code!r}){place_of(error)}")
    told.__cause__ = error
    return told


def is_peer_failure(error: BaseException) -> bool:
    """True when the error only says that another rank went away or did not come."""
    if isinstance(error, PeerLost | dist.DistNetworkError | dist.DistStoreError):
        return True
    # gloo raises plain RuntimeErrors; these are the words that its transport uses.
    marks = (
        "Connection closed by peer",
        "Connection reset by peer",
        "Timed out waiting",
        "gloo/transport",
        "Socket closed",
    )
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in marks)
