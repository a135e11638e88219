"""Processes that are kept for many tasks: started together, given one task, answered or ended by a deadline.

Ranks that failed are never used again: one that raised has left its peers inside a collective. The pool then ends all of them,
and the next task starts fresh ones. They die with the parent, and every task has a store of its own, a file.

``serve`` is the loop of such a process: tasks come in as lines of JSON, and each is answered by one line. Importing torch takes
two seconds and a proof or a calibration has dozens of tasks, so processes are started once and serve many of them.
"""

import gc
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from shoal.core.clock import Deadline
from shoal.core.errors import EXIT_NO, Refusal, RequestError, RunError
from shoal.launch import forkclient
from shoal.launch.environments import inherited, process_environment, rank_environment
from shoal.launch.forkclient import PRELOAD_OPTIMIZER, ForkClient
from shoal.launch.process import Process, Streams
from shoal.launch.supervisor import KILL_SECONDS, Command, Supervisor

# After one rank failed the others get this long to say what they saw; most are stuck in a collective and never will.
_GRACE_SECONDS = 1.0
_LOG_TAIL = 1500
_READ_BYTES = 1 << 16

Handler = Callable[[dict[str, Any]], dict[str, Any]]


class _Member:
    """One process of the pool, with the pipes to it and its answer to the task of now."""

    def __init__(self, process: Process, tasks: int, replies: int, log: Path) -> None:
        self.process = process
        self.tasks = tasks
        self.replies = replies
        self.log = log
        self.pending = b""
        self.answer: dict[str, Any] | None = None

    @property
    def tail(self) -> str:
        """The last of what it printed."""
        return self.log.read_text(errors="replace")[-_LOG_TAIL:].strip()

    def close(self) -> None:
        """Close the pipes."""
        os.close(self.tasks)
        os.close(self.replies)


class Pool:
    """``size`` processes that run ``module``; started at the first task.

    Args:
        module: has a ``main``, which calls ``serve``.
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
        self._environment: dict[str, str] = {}
        self._client: ForkClient | None = None
        self._supervisor: Supervisor | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, task: Mapping[str, Any], *, deadline_seconds: float) -> list[dict[str, Any]]:
        """Give every process the same task and return what each answered, by rank.

        Raises:
            RequestError: a process refused it as a wrong request, and no other failed for a reason of its own.
            RunError: one failed, died or did not answer in time; says which, and all are ended.
        """
        try:
            if not self._members:
                self._start()
            line = json.dumps(dict(task)).encode() + b"\n"
            for member in self._members:
                member.pending, member.answer = b"", None
                try:
                    _write_all(member.tasks, line)
                except BrokenPipeError:
                    pass  # It died, and has said why in its log; the wait below finds out.
            return self._collect(Deadline(seconds=deadline_seconds))
        except BaseException:
            self._end_members()
            raise

    def _start(self) -> None:
        if self._client is None:
            self._environment = {**inherited(), **process_environment(threads=self.threads)}
            preload = [self.module, PRELOAD_OPTIMIZER] if self.size >= forkclient.FEWEST_TO_FORK else []
            self._client = ForkClient(preload, self._environment)
        self._client.open()
        self._folder = tempfile.TemporaryDirectory(prefix="shoal-pool-logs-")
        self._supervisor = Supervisor(self._client, environment=self._environment)
        for rank in range(self.size):
            member = self._start_one(rank, Path(self._folder.name) / f"{self.called}-{rank}.txt", self._supervisor)
            self._members.append(member)
            self._supervisor.watch(member.replies, partial(self._read, member))

    def _start_one(self, rank: int, log: Path, supervisor: Supervisor) -> _Member:
        command = Command(
            name=f"{self.called} {rank}",
            module=self.module,
            environment=rank_environment(rank=rank, num_ranks=self.size),
        )
        (stdin, tasks), (replies, stdout) = os.pipe(), os.pipe()
        try:
            with log.open("wb") as output:
                process = supervisor.start(command, Streams(stdin=stdin, stdout=stdout, stderr=output.fileno()))
        except BaseException:
            os.close(tasks)
            os.close(replies)
            raise
        finally:
            os.close(stdin)
            os.close(stdout)
        return _Member(process, tasks, replies, log)

    def _read(self, member: _Member) -> None:
        assert self._supervisor is not None
        data = os.read(member.replies, _READ_BYTES)
        member.pending += data
        if not data:
            self._supervisor.unwatch(member.replies)
            member.answer = {"error": self._describe_death(member), "is_request": False, "where": ""}
        elif b"\n" in member.pending:
            member.answer = json.loads(member.pending)

    def _collect(self, deadline: Deadline) -> list[dict[str, Any]]:
        assert self._supervisor is not None
        while any(member.answer is None for member in self._members) and not deadline.is_over:
            # What a process forked may hold its pipe open; that is ended with it, and then the end of the pipe is read.
            self._supervisor.turn(min(0.2, deadline.remaining))
            failed = any(member.answer is not None and member.answer["error"] for member in self._members)
            if failed and deadline.remaining > _GRACE_SECONDS:
                deadline = Deadline(seconds=_GRACE_SECONDS)
        answers = {rank: member.answer for rank, member in enumerate(self._members) if member.answer is not None}
        return self._judge(answers, deadline)

    def _judge(self, answers: Mapping[int, dict[str, Any]], deadline: Deadline) -> list[dict[str, Any]]:
        errors = {rank: answer for rank, answer in answers.items() if answer["error"]}
        refusals = [answer["error"] for answer in errors.values() if answer["is_request"]]
        # One rank may refuse in the middle of a run, and the others wait for it in vain or have lost it.
        if refusals and all(answer["is_request"] or _blames_peer(answer["error"]) for answer in errors.values()):
            raise RequestError(refusals[0])
        if errors:
            # A rank that only lost its peer is not the one to listen to.
            rank, answer = min(errors.items(), key=lambda item: (_blames_peer(item[1]["error"]), item[0]))
            where = f" ({answer['where']})" if answer["where"] else ""
            failure = RunError(f"{self.called} {rank}: {answer['error']}{where}")
            # For those who keep it: the message is what a user sees.
            failure.add_note(answer.get("traceback", ""))
            raise failure
        missing = [rank for rank in range(self.size) if rank not in answers]
        if missing:
            raise RunError(
                f"{self.called} {', '.join(map(str, missing))} of {self.size} did not answer within {deadline.seconds:g} s: "
                f"it hangs, or a collective waits for a peer that does not come\n{self._members[missing[0]].tail}"
            )
        return [answers[rank] for rank in range(self.size)]

    def _describe_death(self, member: _Member) -> str:
        # It has closed its pipe, so it ends, or is made to.
        try:
            code = member.process.wait(KILL_SECONDS)
        except TimeoutError:
            return f"the process closed its pipe and did not end within {KILL_SECONDS:g} s\n{member.tail}"
        left = ", in the middle of a task: something that it runs called exit" if code == 0 else ""
        return f"the process ended with code {code}{left}\n{member.tail}"

    def end(self) -> None:
        """End every process; the next task starts new ones."""
        self._end_members()
        if self._client is not None:
            self._client.close()
            self._client = None

    def _end_members(self) -> None:
        if self._supervisor is not None:
            self._supervisor.close()
            self._supervisor = None
        for member in self._members:
            member.close()
        self._members = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __enter__(self) -> "Pool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _blames_peer(text: str) -> bool:
    marks = ("closed by peer", "reset by peer", "Timed out waiting", "Socket closed", "gloo/transport", "waited")
    return any(mark in text for mark in marks)


def serve(handler: Handler) -> None:
    """Answer tasks until the parent closes the pipe. A task that raises is answered with its error, and the process goes on.

    What a task prints goes to the log: the reply line is the only thing on the pipe.
    """
    owner = os.getpid()
    sys.stdout.flush()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        answer = _answer(handler, json.loads(line))
        if os.getpid() != owner:
            os._exit(EXIT_NO)  # What a task forked and let return answers for nobody.
        replies.write(json.dumps(answer) + "\n")
        replies.flush()
        # A trainer and its groups refer to each other; uncollected, each plan would leave its models and gloo's threads behind.
        gc.collect()
    # Not a return: threads of a broken group could keep the process alive.
    os._exit(0)


def _answer(handler: Handler, task: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"error": None, **handler(task)}
    # The boundary of the process: the parent decides what a failed task means, and one that calls exit has failed.
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        is_ours = type(error).__module__.startswith("shoal.")
        text = str(error) if is_ours else f"{type(error).__name__}: {error}"
        is_request = isinstance(error, RequestError | Refusal)
        return {"error": text, "is_request": is_request, "where": where, "traceback": traceback.format_exc()}
