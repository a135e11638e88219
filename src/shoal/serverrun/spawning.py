"""Starts the processes of a crew, forked where the system can hand orphans over, else one interpreter each.

No torch. Every process is the crew's own child: it is seen to die at once, with its exit code, and it dies with the crew.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from shoal.launch.forkclient import PRELOAD_OPTIMIZER, ForkClient, ForkedProcess, Streams, kill_group

_WARM = ("shoal.serverrun.warming", PRELOAD_OPTIMIZER)


class Watched:
    """A forked process, as an event loop sees it."""

    def __init__(self, process: ForkedProcess, on_end: Callable[[], None]) -> None:
        self.pid = process.pid
        self._process = process
        self._on_end = on_end
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._descriptor = os.pidfd_open(process.pid)
        self._loop.add_reader(self._descriptor, self._reap)

    @property
    def returncode(self) -> int | None:
        """The exit code as ``subprocess`` gives it; None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait for its end; the exit code."""
        await self._ended.wait()
        return self._process.wait()

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def _reap(self) -> None:
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        self._process.wait()
        self._ended.set()
        self._on_end()


Started = Watched | asyncio.subprocess.Process
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
        self._client = ForkClient(_WARM, self._environment)
        self._watchers: set[asyncio.Task[None]] = set()
        self._lock = asyncio.Lock()

    def open(self) -> None:
        """Begin to import what roles need; what is started meanwhile waits for it."""
        self._client.open()

    async def start(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        log: Path,
        on_end: Callable[[], None],
        is_forked: bool = True,
    ) -> Started:
        """Start ``python -m module arguments``, with its output in ``log``.

        Args:
            module: has a ``main``.
            arguments: of its command line.
            log: is appended to.
            on_end: called when it has ended.
            is_forked: False for what needs no torch, and is sooner there by itself.
        """
        with log.open("ab", buffering=0) as output:
            forked = await self._fork(module, arguments, output.fileno()) if is_forked else None
            if forked is not None:
                return _watch(forked, on_end)
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "shoal.launch.child",
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
        async with self._lock:
            self._client.close()

    async def _fork(self, module: str, arguments: Sequence[str], output: int) -> ForkedProcess | None:
        """A new process from the nursery; None when there is none to be had."""
        async with self._lock:
            forking = asyncio.ensure_future(asyncio.to_thread(self._start_forked, module, arguments, output))
            try:
                process = await asyncio.shield(forking)
            except asyncio.CancelledError:
                # The thread goes on, and the file must be open until it is done; what it starts is nobody's.
                self._client.abandon()
                process = await forking
                if process is not None:
                    process.kill()
                    process.wait()
                raise
            # Where one died, another is tried for those that come later; from this thread, with which it is to die.
            if process is None:
                self._client.open()
            return process

    def _start_forked(self, module: str, arguments: Sequence[str], output: int) -> ForkedProcess | None:
        streams = Streams(stdout=output, stderr=output)
        return self._client.start(module, arguments, environment={}, streams=streams, descriptors=self._descriptors)


def _watch(process: ForkedProcess, on_end: Callable[[], None]) -> Watched:
    try:
        return Watched(process, on_end)
    except OSError:
        # No descriptor to watch it by: it must not run on with nobody to end it.
        process.kill()
        process.wait()
        raise


async def _tell_end(process: asyncio.subprocess.Process, on_end: Callable[[], None]) -> None:
    try:
        await process.wait()
    finally:
        # It was waited for, but a group that still has somebody in it keeps its number.
        if process.returncode is not None:
            kill_group(process.pid)
    on_end()
