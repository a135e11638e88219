"""What srun and mpirun say of processes that failed, as they were seen to say it, and who is to blame then."""

import pytest

from shoal.launch.clusters.culprits import TaskEnd, find_culprit
from shoal.launch.clusters.mpi import MpiEnds
from shoal.launch.clusters.slurm import SlurmEnds
from shoal.launch.errorreport import ErrorReport

OPENMPI_KILLED = """\
--------------------------------------------------------------------------
Primary job  terminated normally, but 1 process returned
a non-zero exit code. Per user-direction, the job has been aborted.
--------------------------------------------------------------------------
mpirun noticed that process rank 1 with PID 0 on node vm exited on signal 9 (Killed).
--------------------------------------------------------------------------
"""
OPENMPI_LEFT = """\
mpirun detected that one or more processes exited with non-zero status, thus causing
the job to be terminated. The first process to do so was:

  Process name: [[27057,1],3]
  Exit code:    7
"""
HYDRA_KILLED = """\
===================================================================================
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 4711 RUNNING AT vm
=   EXIT CODE: 9
=   CLEANING UP REMAINING PROCESSES
"""
SLURM = """\
srun: error: n02: task 1: Killed
srun: launch/slurm: _step_signal: Terminating StepId=2.0
slurmstepd-n01: error: *** STEP 2.0 ON n01 CANCELLED AT 2026-11-18T16:37:26 ***
srun: error: n01: task 0: Exited with exit code 1
"""


def _read(reader, text: str) -> list[TaskEnd]:
    return [end for line in text.splitlines() for end in reader.read(line)]


def _report(rank: int, *, peer: bool, message: str = "rank 1 died", time: float = 5.0) -> ErrorReport:
    return ErrorReport(
        rank=rank,
        step=12,
        phase="backward",
        type="shoal.comm.channel.PeerLost" if peer else "ValueError",
        message=message,
        traceback="Traceback ...",
        peer_failure=peer,
        time=time,
        exit="run",
    )


@pytest.mark.parametrize(
    ("reader", "text", "ends"),
    [
        (MpiEnds(), OPENMPI_KILLED, [TaskEnd(rank=1, host="vm", exit_code=-9)]),
        (MpiEnds(), OPENMPI_LEFT, [TaskEnd(rank=3, exit_code=7)]),
        (MpiEnds(), HYDRA_KILLED, [TaskEnd(rank=None, host="vm", exit_code=-9)]),
        (SlurmEnds(), SLURM, [TaskEnd(rank=1, host="n02", exit_code=-9), TaskEnd(rank=0, host="n01", exit_code=1)]),
        (
            SlurmEnds(),
            "srun: error: n[01-02]: tasks 0-1,3: Exited with exit code 2",
            [TaskEnd(rank=rank, exit_code=2) for rank in (0, 1, 3)],
        ),
        (
            SlurmEnds(),
            "srun: error: n01: task 2: Segmentation fault (core dumped)",
            [TaskEnd(rank=2, host="n01", exit_code=-11)],
        ),
        (
            SlurmEnds(),
            "srun: error: n01: task 2: Out Of Memory",
            [TaskEnd(rank=2, host="n01", exit_code=None, cause="Out Of Memory")],
        ),
        (
            SlurmEnds(),
            "srun: error: Node failure on n02",
            [TaskEnd(rank=None, host="n02", exit_code=None, cause="SLURM says that the node failed")],
        ),
        (SlurmEnds(), "step=3/30 loss=1.0", []),
    ],
)
def test_the_words_of_a_launcher(reader, text, ends):
    assert _read(reader, text) == ends


def _blame(ends, reports=(), num_ranks=2, exit_code=1):
    by_rank = {one.rank: one for one in reports}
    return find_culprit(ends, by_rank, num_ranks=num_ranks, launcher="slurm", exit_code=exit_code)


def test_a_killed_rank_is_the_culprit_though_the_other_reported_first():
    ends = [TaskEnd(rank=0, host="n01", exit_code=1), TaskEnd(rank=1, host="n02", exit_code=-9)]
    found = _blame(ends, [_report(0, peer=True)])
    assert found.rank == 1 and found.exit_code == 1 and found.step == 12
    first, second = found.message.splitlines()
    assert first == "rank 1 on host n02 failed: killed by signal 9 (SIGKILL)"
    assert second == "rank 0 was at step 12 in phase 'backward' and failed in consequence: rank 1 died"


def test_an_exception_is_told_with_its_traceback():
    ends = [TaskEnd(rank=1, host="n02", exit_code=1), TaskEnd(rank=0, host="n01", exit_code=-15)]
    found = _blame(ends, [_report(1, peer=False, message="bad shape")])
    # A launcher ends the others by SIGTERM after the first has failed.
    assert found.rank == 1, found.message
    assert found.message.startswith("rank 1 on host n02 failed at step 12 in phase 'backward': ValueError: bad shape")
    assert "Traceback ..." in found.message


def test_a_launcher_that_names_no_rank_means_the_one_that_said_nothing():
    found = _blame([TaskEnd(rank=None, host="vm", exit_code=-9)], [_report(0, peer=True)])
    assert found.rank == 1 and found.message.startswith("rank 1 on host vm failed: killed by signal 9")


def test_a_launcher_that_names_no_rank_while_all_were_silent_is_quoted():
    """MPICH kills the others before they can say anything."""
    found = _blame([TaskEnd(rank=None, host="vm", exit_code=-9)], exit_code=9)
    assert found.rank is None and found.exit_code == 1
    assert "a process on host vm, whose rank it does not say, was killed by signal 9 (SIGKILL)" in found.message


def test_a_launchers_own_reason_is_told():
    found = _blame([TaskEnd(rank=1, host="n02", exit_code=None, cause="Out Of Memory")], [_report(0, peer=True)])
    assert found.rank == 1 and found.message.startswith("rank 1 on host n02 failed: Out Of Memory")


def test_nobody_is_blamed_where_nothing_is_known():
    found = _blame([], exit_code=7)
    assert found.rank is None and found.message == "slurm ended with exit code 7; what it said itself is above"


def test_a_wrong_request_was_told_by_the_first_rank():
    ends = [TaskEnd(rank=rank, exit_code=2) for rank in (0, 1)]
    assert _blame(ends, exit_code=2).exit_code == 2 and _blame(ends, exit_code=2).message == ""
