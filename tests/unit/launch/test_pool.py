"""The processes of a proof: kept between jobs, ended when one fails, never left behind."""

import os

import pytest

from shoal.core.errors import RequestError, RunError
from shoal.launch.pool import Pool

ECHO = '''
"""Answers with its rank, or misbehaves as the job says."""
import os, signal, sys, time
from shoal.core.errors import Refusal, RequestError
from shoal.launch.pool import serve

def handle(job):
    rank = int(os.environ["RANK"])
    if job["do"] == "raise" and rank == 1:
        raise ValueError("a bad day")
    if job["do"] == "refuse":
        raise RequestError("not like this")
    if job["do"] == "refuse in the middle":
        raise Refusal("not this module") if rank == 1 else RuntimeError("Connection closed by peer")
    if job["do"] == "refuse and fail":
        raise Refusal("not this module") if rank == 1 else ValueError("a bad day")
    if job["do"] == "die" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if job["do"] == "exit" and rank == 1:
        sys.exit(0)
    if job["do"] == "leave a child" and rank == 1:
        if os.fork() == 0:
            time.sleep(60)
        os._exit(0)
    if job["do"] == "fork" and rank == 1 and (child := os.fork()):
        os.waitpid(child, 0)
    if job["do"] == "hang" and rank == 1:
        time.sleep(60)
    print("this goes to the log")
    return {"rank": rank, "pid": os.getpid()}

def main():
    serve(handle)

if __name__ == "__main__":
    main()
'''


@pytest.fixture
def pool(tmp_path, monkeypatch):
    (tmp_path / "echo_worker.py").write_text(ECHO)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Pool("echo_worker", 2, threads=1) as made:
        yield made


def test_processes_serve_many_jobs(pool):
    first, second = (pool.run({"do": "answer"}, deadline_seconds=30) for _ in range(2))
    assert [answer["rank"] for answer in first] == [0, 1]
    assert first == second


@pytest.mark.parametrize(
    ("do", "message"),
    [
        ("raise", "rank 1: ValueError: a bad day"),
        ("die", "rank 1: the process ended with code -9"),
        ("exit", "rank 1: SystemExit: 0"),
        # Its child holds the pipe open, and is ended with it.
        ("leave a child", "rank 1: the process ended with code 0, in the middle of a task"),
    ],
)
def test_a_failure_ends_all_and_the_next_job_starts_anew(pool, do, message):
    before = pool.run({"do": "answer"}, deadline_seconds=30)
    with pytest.raises(RunError, match=message):
        pool.run({"do": do}, deadline_seconds=30)
    for answer in before:
        with pytest.raises(ProcessLookupError):
            os.kill(answer["pid"], 0)
    assert [answer["rank"] for answer in pool.run({"do": "answer"}, deadline_seconds=30)] == [0, 1]


def test_what_a_job_forks_and_lets_return_answers_for_nobody(pool):
    pool.run({"do": "fork"}, deadline_seconds=30)
    assert [answer["rank"] for answer in pool.run({"do": "answer"}, deadline_seconds=30)] == [0, 1]


def test_a_hang_is_ended_by_the_deadline(pool):
    pool.run({"do": "answer"}, deadline_seconds=30)
    with pytest.raises(RunError, match=r"rank 1 of 2 did not answer within 0\.5 s"):
        pool.run({"do": "hang"}, deadline_seconds=0.5)


def test_a_request_that_all_refuse_is_a_wrong_request(pool):
    with pytest.raises(RequestError, match="not like this"):
        pool.run({"do": "refuse"}, deadline_seconds=30)


def test_one_that_refuses_in_the_middle_of_a_run_speaks_for_those_that_lost_it(pool):
    """T5 under cp was said to have crashed, though the message was a refusal with its fix."""
    with pytest.raises(RequestError, match=r"^not this module$"):
        pool.run({"do": "refuse in the middle"}, deadline_seconds=30)
    with pytest.raises(RunError, match="a bad day"):
        pool.run({"do": "refuse and fail"}, deadline_seconds=30)
