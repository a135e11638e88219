"""Processes that are kept for many jobs, seen from the parent: started together, given one job, answered or ended by a deadline.

Ranks that failed are never used again: one that raised has left its peers inside a collective. The pool then ends all of them,
and the next job starts fresh ones. They die with the parent (``launch/forkclient.py``), and every job has a store of its own, a
file.

``serve`` is the loop of such a process: tasks come in as lines of JSON, and each is answered by one line. Importing torch takes
two seconds and a proof or a calibration has dozens of tasks, so processes are started once and serve many of them.
"""

import contextlib
import gc
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from shoal.core.clock import Deadline
from shoal.core.errors import EXIT_NO, Refusal, RequestError, RunError
from shoal.launch import forkclient
from shoal.launch.forkclient import PRELOAD_OPTIMIZER, ForkClient, ForkedProcess, Streams, kill_group, reap

# After one rank failed the others get this long to say what they saw; most are stuck in a collective and never will.
_GRACE_SECONDS = 1.0
_DEATH_SECONDS = 10.0
_LOG_TAIL = 1500


class _Member:
    """One process, with the pipes to it."""

    def __init__(self, process: subprocess.Popen[bytes] | ForkedProcess, jobs: int, replies: int) -> None:
        self.process = process
        self.jobs: IO[bytes] = os.fdopen(jobs, "wb", buffering=0)
        self.replies: IO[bytes] = os.fdopen(replies, "rb", buffering=0)

    def kill(self) -> None:
        """Kill it and whatever it started in its own session, unless it has ended."""
        if reap(self.process) is None:
            kill_group(self.process.pid)
            self.process.kill()

    def close(self) -> None:
        """Wait for its end, and close the pipes."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=_DEATH_SECONDS)
        self.jobs.close()
        self.replies.close()


class Pool:
    """``size`` processes that run ``module``; started at the first job.

    Args:
        module: has a ``main``, which serves jobs (``jobs.py``).
        size: how many.
        threads: of each.
        called: what messages call one.
    """

    def __init__(self, module: str, size: int, *, threads: int, called: str = "rank") -> None:
        self.module = module
        self.size = size
        self.threads = threads
        self.called = called
        self._members: list[_Member] = []
        self._client: ForkClient | None = None
        self._logs: list[Path] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, job: Mapping[str, Any], *, deadline_seconds: float) -> list[dict[str, Any]]:
        """Give every process the same job and return what each answered, by rank.

        Raises:
            RequestError: a process refused it as a wrong request, and no other failed for a reason of its own.
            RunError: one failed, died or did not answer in time; says which, and all are ended.
        """
        if not self._members:
            try:
                self._start()
            except BaseException:
                self._end_members()
                raise
        line = json.dumps(dict(job)).encode() + b"\n"
        try:
            for member in self._members:
                member.jobs.write(line)
        except BrokenPipeError:
            # Whoever died has said why in its log; the wait below finds out who.
            pass
        try:
            return self._collect(Deadline(seconds=deadline_seconds))
        except BaseException:
            self._end_members()
            raise

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="shoal-pool-logs-")
        if self._client is None:
            warm = [self.module, PRELOAD_OPTIMIZER] if self.size >= forkclient.FEWEST_TO_FORK else []
            self._client = ForkClient(warm, self._environment(-1))
        self._client.open()
        for rank in range(self.size):
            log = Path(self._folder.name) / f"{self.called}-{rank}.txt"
            self._logs.append(log)
            (stdin, jobs), (replies, stdout) = os.pipe(), os.pipe()
            try:
                with log.open("wb") as output:
                    process = self._start_one(rank, Streams(stdin=stdin, stdout=stdout, stderr=output.fileno()))
            except BaseException:
                os.close(jobs)
                os.close(replies)
                raise
            finally:
                os.close(stdin)
                os.close(stdout)
            self._members.append(_Member(process, jobs, replies))

    def _start_one(self, rank: int, streams: Streams) -> subprocess.Popen[bytes] | ForkedProcess:
        assert self._client is not None
        environment = self._environment(rank)
        forked = self._client.start(self.module, [], environment=environment, streams=streams)
        return forked or subprocess.Popen(
            [sys.executable, "-m", "shoal.launch.child", self.module],
            env=environment,
            stdin=streams.stdin,
            stdout=streams.stdout,
            stderr=streams.stderr,
            # Ctrl-C in the terminal goes to the parent alone, which ends the processes.
            start_new_session=True,
        )

    def _environment(self, rank: int) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
        return {
            **inherited,
            "RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(self.size),
            "OMP_NUM_THREADS": str(self.threads),
            "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
            "PYTHONFAULTHANDLER": "1",
            "SHOAL_SUPERVISOR_PID": str(os.getpid()),
        }

    def _collect(self, deadline: Deadline) -> list[dict[str, Any]]:
        answers: dict[int, dict[str, Any]] = {}
        pending = dict.fromkeys(range(self.size), b"")
        with selectors.DefaultSelector() as selector:
            for rank, member in enumerate(self._members):
                selector.register(member.replies, selectors.EVENT_READ, rank)
            while len(answers) < self.size:
                for key, _ in selector.select(timeout=min(0.2, deadline.remaining)):
                    rank = key.data
                    data = os.read(key.fd, 1 << 16)
                    pending[rank] += data
                    if not data:
                        selector.unregister(key.fileobj)
                        answers[rank] = {"error": self._death(rank), "is_request": False, "where": ""}
                    elif b"\n" in pending[rank]:
                        answers[rank] = json.loads(pending[rank])
                for rank, member in enumerate(self._members):
                    # What it forked may hold its pipe open; that is ended with it, and then the end of the pipe is read.
                    if rank not in answers:
                        reap(member.process)
                failed = any(answer["error"] for answer in answers.values())
                if failed and deadline.remaining > _GRACE_SECONDS:
                    deadline = Deadline(seconds=_GRACE_SECONDS)
                if deadline.is_over and len(answers) < self.size:
                    break
        return self._judge(answers, deadline)

    def _judge(self, answers: Mapping[int, dict[str, Any]], deadline: Deadline) -> list[dict[str, Any]]:
        errors = {rank: answer for rank, answer in sorted(answers.items()) if answer["error"]}
        refusals = [answer["error"] for answer in errors.values() if answer["is_request"]]
        # One rank may refuse in the middle of a run, and the others wait for it in vain or have lost it.
        if refusals and all(answer["is_request"] or _blames_peer(answer["error"]) for answer in errors.values()):
            raise RequestError(refusals[0])
        if errors:
            # A rank that only lost its peer is not the one to listen to.
            rank, answer = min(errors.items(), key=lambda item: (_blames_peer(item[1]["error"]), item[0]))
            where = f" ({answer['where']})" if answer["where"] else ""
            failure = RunError(f"{self.called} {rank}: {answer['error']}{where}")
            # For who keeps it: the message is what a user sees.
            failure.add_note(answer.get("traceback", ""))
            raise failure
        missing = [rank for rank in range(self.size) if rank not in answers]
        if missing:
            raise RunError(
                f"{self.called} {', '.join(map(str, missing))} of {self.size} did not answer within {deadline.seconds:g} s: "
                f"it hangs, or a collective waits for a peer that does not come\n{self._tail(missing[0])}"
            )
        return [answers[rank] for rank in range(self.size)]

    def _death(self, rank: int) -> str:
        # It has closed its pipe, so it ends, or is made to.
        member, deadline = self._members[rank], Deadline(seconds=_DEATH_SECONDS)
        while (code := reap(member.process)) is None and not deadline.is_over:
            time.sleep(0.01)
        if code is None:
            member.kill()
            return f"the process closed its pipe and did not end within {_DEATH_SECONDS:g} s\n{self._tail(rank)}"
        left = ", in the middle of a job: something that it runs called exit" if code == 0 else ""
        return f"the process ended with code {code}{left}\n{self._tail(rank)}"

    def _tail(self, rank: int) -> str:
        return self._logs[rank].read_text(errors="replace")[-_LOG_TAIL:].strip()

    def end(self) -> None:
        """End every process; the next job starts new ones."""
        self._end_members()
        if self._client is not None:
            self._client.close()
            self._client = None

    def _end_members(self) -> None:
        for member in self._members:
            member.kill()
        for member in self._members:
            member.close()
        self._members, self._logs = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __enter__(self) -> "Pool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


def _blames_peer(text: str) -> bool:
    marks = ("closed by peer", "reset by peer", "Timed out waiting", "Socket closed", "gloo/transport", "waited")
    return any(mark in text for mark in marks)


Handler = Callable[[dict[str, Any]], dict[str, Any]]


def serve(handler: Handler) -> None:
    """Answer jobs until the parent closes the pipe. A job that raises is answered with its error, and the process goes on."""
    owner = os.getpid()
    sys.stdout.flush()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        answer = _answer(handler, json.loads(line))
        if os.getpid() != owner:
            os._exit(EXIT_NO)  # What a job forked and let return answers for nobody.
        replies.write(json.dumps(answer) + "\n")
        replies.flush()
        # A trainer and its groups refer to each other; uncollected, each plan would leave its models and gloo's threads behind.
        gc.collect()
    # Not a return: threads of a broken group could keep the process alive.
    os._exit(0)


def _answer(handler: Handler, job: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"error": None, **handler(job)}
    # The boundary of the process: the parent decides what a failed job means, and one that calls exit has failed.
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        is_ours = type(error).__module__.startswith("shoal.")
        text = str(error) if is_ours else f"{type(error).__name__}: {error}"
        is_request = isinstance(error, RequestError | Refusal)
        return {"error": text, "is_request": is_request, "where": where, "traceback": traceback.format_exc()}
