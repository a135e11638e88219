"""Starts the processes of a crew, from a nursery where the system can hand orphans over, else one interpreter each.

No torch. Every process is the crew's own child: it is seen to die at once, with its exit code, and it dies with the crew.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOM = "-" * 1024
"""An argument that means nothing: its memory holds the command line of the role, for those who look from outside."""
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_UNKNOWN_CODE = -int(signal.SIGKILL)


class Adopted:
    """A process that became this one's child; what a crew needs to know of it."""

    def __init__(self, pid: int, on_end: Callable[[], None]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._on_end = on_end
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._descriptor = os.pidfd_open(pid)
        self._loop.add_reader(self._descriptor, self._reap)

    async def wait(self) -> int:
        """Wait for its end; the exit code as ``subprocess`` gives it."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def _reap(self) -> None:
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        try:
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
        except ChildProcessError:
            # It was killed before it was handed over; whoever had it took its code.
            self.returncode = _UNKNOWN_CODE
        self._ended.set()
        self._on_end()


Started = Adopted | asyncio.subprocess.Process
"""A process of the crew."""


class Spawner:
    """See the module.

    Args:
        environment: of every process.
        descriptors: open files that they inherit.
    """

    def __init__(self, environment: Mapping[str, str], *, descriptors: Sequence[int]) -> None:
        self._environment = dict(environment)
        self._descriptors = tuple(descriptors)
        self._nursery: asyncio.subprocess.Process | None = None
        self._watchers: set[asyncio.Task[None]] = set()
        self._lock = asyncio.Lock()
        self._adopted_before = _adopts_orphans()
        self._is_forking = self._adopted_before is not None and _adopt_orphans(True)

    async def open(self) -> None:
        """Begin to warm the nursery up; what is started meanwhile waits for it."""
        if self._is_forking:
            await self._open_nursery()

    async def start(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        log: Path,
        on_end: Callable[[], None],
        from_nursery: bool = True,
    ) -> Started:
        """Start ``python -m module arguments``, with its output in ``log``.

        Args:
            module: has a ``main``.
            arguments: of its command line.
            log: is appended to.
            on_end: called when it has ended.
            from_nursery: False for what needs no torch, and is sooner there by itself.
        """
        if self._is_forking and from_nursery:
            pid = await self._fork(module, arguments, log)
            if pid is not None:
                return Adopted(pid, on_end)
        with log.open("ab", buffering=0) as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "shoal.elastic.child",
                module,
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=self._descriptors,
                env=self._environment,
            )
        task = asyncio.get_running_loop().create_task(_tell_end(process, on_end))
        self._watchers.add(task)
        task.add_done_callback(self._watchers.discard)
        return process

    async def close(self) -> None:
        """End the nursery, and adopt orphans no longer. What was started is the caller's."""
        for task in list(self._watchers):
            task.cancel()
        await self._close_nursery()
        # This process may be a user's own, which goes on: orphans of whatever it starts later are not for it to reap.
        if self._adopted_before is not None:
            _adopt_orphans(self._adopted_before)

    async def _fork(self, module: str, arguments: Sequence[str], log: Path) -> int | None:
        """The pid of a new process from the nursery; None when there is no nursery to be had."""
        wanted = {"module": module, "arguments": list(arguments), "environment": {}, "log": str(log.resolve())}
        async with self._lock:
            for _ in range(2):
                if self._nursery is None or self._nursery.returncode is not None:
                    await self._open_nursery()
                assert self._nursery is not None and self._nursery.stdin and self._nursery.stdout
                try:
                    self._nursery.stdin.write(json.dumps(wanted).encode() + b"\n")
                    await self._nursery.stdin.drain()
                    line = await self._nursery.stdout.readline()
                    if line:
                        return int(line)
                except (BrokenPipeError, ConnectionResetError):
                    pass
                # It died; a new one is tried once, then every process is started by itself.
                await self._close_nursery()
            self._is_forking = False
            return None

    async def _open_nursery(self) -> None:
        self._nursery = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "shoal.elastic.child",
            "shoal.trainer.servers.nursery",
            ROOM,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            pass_fds=self._descriptors,
            # numpy's own threads would not survive a fork, and nothing here needs them.
            env={**self._environment, "OPENBLAS_NUM_THREADS": "1"},
        )

    async def _close_nursery(self) -> None:
        nursery, self._nursery = self._nursery, None
        if nursery is None:
            return
        with contextlib.suppress(ProcessLookupError):
            nursery.kill()
        await nursery.wait()
        # Whoever asked for these gave up before they were there.
        assert nursery.stdout is not None
        for line in (await nursery.stdout.read()).splitlines():
            with contextlib.suppress(ProcessLookupError, ChildProcessError, ValueError):
                os.kill(int(line), signal.SIGKILL)
                os.waitpid(int(line), 0)


def _adopts_orphans() -> bool | None:
    """Whether the kernel makes this process the parent of its orphaned descendants; None where it cannot."""
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        return None
    answer = ctypes.c_int(0)
    failed = ctypes.CDLL(None, use_errno=True).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(answer), 0, 0, 0)
    return None if failed else bool(answer.value)


def _adopt_orphans(wanted: bool) -> bool:
    """Ask the kernel to make, or not to make, this process that parent; False when it does not."""
    return int(ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(wanted), 0, 0, 0)) == 0


async def _tell_end(process: asyncio.subprocess.Process, on_end: Callable[[], None]) -> None:
    await process.wait()
    on_end()
