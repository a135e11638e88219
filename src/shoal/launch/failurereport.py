"""The last thing a failed run prints: which rank, where, why, its own traceback, and what to try."""

import signal

from shoal.core.errors import EXIT_WRONG_REQUEST
from shoal.core.units import format_bytes
from shoal.launch.blame import Culprit, name_signal
from shoal.launch.procfs import total_memory_bytes

_STACK_MARK = "(most recent call first)"
"""In what ``faulthandler`` prints of a thread."""
_CRASH_SIGNALS = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT})


def headline(culprit: Culprit) -> str:
    """``rank 1 failed at step 12 in phase 'backward': killed by signal 9 (SIGKILL)``."""
    where = f"at step {culprit.step} in phase {culprit.phase!r}" if culprit.phase else "before its first phase"
    on_host = f" on host {culprit.host}" if culprit.host else ""
    return f"rank {culprit.rank}{on_host} failed {where}: {culprit.cause}"


def say_stopping(number: int, grace: float, *, has_ranks: bool) -> str:
    """What is shown when a signal asks a run to stop."""
    if not has_ranks:
        return f"{name_signal(number)}: stopping before a rank was started"
    return (
        f"{name_signal(number)}: finishing the step and writing a checkpoint, for at most {grace:g} s; "
        "another Ctrl-C stops at once"
    )


def describe(culprit: Culprit, *, debug: bool = False, can_resume: bool = True) -> str:
    """The whole story of a failure as text; ``can_resume`` says that there is a checkpoint to go on from.

    A wrong request is its message alone, and a failure that was foreseen needs no traceback, unless ``debug`` asks for it.
    """
    report = culprit.report
    if culprit.exit_code == EXIT_WRONG_REQUEST and report is not None:
        return f"{report.message}\n{report.traceback}".rstrip() if debug else report.message
    parts = [headline(culprit)]
    if report is not None and (debug or not report.type.startswith("shoal.")):
        parts.append(report.traceback.rstrip())
    elif report is None and culprit.tail:
        parts.append(f"the last lines that rank {culprit.rank} wrote to stderr:\n{_indent(culprit.tail)}")
    if culprit.others:
        parts.append("\n".join(culprit.others))
    parts.append("\n".join(f"try: {line}" for line in advice(culprit, can_resume=can_resume)))
    return "\n\n".join(part for part in parts if part)


def advice(culprit: Culprit, *, can_resume: bool = True) -> list[str]:
    """What a person can do about it, the most likely first."""
    lines: list[str] = []
    if culprit.kind == "signal":
        lines += _signal_advice(culprit)
    elif culprit.kind == "hang":
        lines += _hang_advice(culprit)
    elif culprit.kind == "host":
        lines.append(
            f"see whether {culprit.host} is up and can be reached (`shoal doctor --hosts ...` tries every pair); where the "
            "network pauses for longer, raise elastic.lease_seconds"
        )
    elif culprit.kind == "exit":
        lines.append(
            "it ended without saying why: something called exit (look for os._exit in the model, the data and what they import), "
            "or it failed before it could report; see its output"
        )
    if culprit.log:
        where = f" on host {culprit.host}" if culprit.host else ""
        lines.append(f"read all that rank {culprit.rank} printed: {culprit.log}{where}")
    # What would end the same again has said itself what to change.
    if can_resume and culprit.can_restart:
        lines.append("continue from the newest checkpoint with --resume, or let --max-restarts do it")
    return lines


def _signal_advice(culprit: Culprit) -> list[str]:
    if culprit.signal == signal.SIGKILL:
        memory = _memory(culprit)
        if culprit.oom_kills > 0:
            killed = f"the kernel's out-of-memory killer struck {culprit.oom_kills} time(s) during this run"
            return [
                f"{killed}, so this rank most likely ran out of memory{memory}: lower train.micro_batch, or use fewer processes"
            ]
        return [
            "SIGKILL was not sent by Shoal: it was a kill -9, a scheduler, or the memory limit of a container, which no counter "
            f"here shows{memory}; `dmesg` may know"
        ]
    if culprit.signal in _CRASH_SIGNALS:
        shared = " (SIGBUS is often a full /dev/shm: see `df /dev/shm`)" if culprit.signal == signal.SIGBUS else ""
        return [
            f"native code crashed{shared}: the stack is in the output above; update or remove the extension it names"
        ]
    return ["the signal was not sent by Shoal: look for a scheduler, a time limit, or another user"]


def _hang_advice(culprit: Culprit) -> list[str]:
    if "stopped" in culprit.cause:
        return ["a process is stopped by SIGSTOP, by Ctrl-Z or by a debugger: find out which, and start again"]
    return [
        "if it was only slow, raise elastic.heartbeat_deadline (signs of life) or elastic.collective_deadline (progress)",
        "if it really hung, its stack is above"
        if _STACK_MARK in culprit.tail
        else "asked for its stack it printed none: it was still starting or stuck in the kernel, or something took SIGUSR1",
    ]


def _memory(culprit: Culprit) -> str:
    if culprit.resident_bytes is None:
        return ""
    total = total_memory_bytes()
    of_total = f" of this machine's {format_bytes(total)}" if total is not None else ""
    return f" (last known memory of rank {culprit.rank}: {format_bytes(culprit.resident_bytes)}{of_total})"


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
