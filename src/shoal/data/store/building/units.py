"""The work of a build in units: a file or a part of one, each read and written by one process, and never twice.

What a unit became is written down under ``building/`` when all its blocks are on the disk. A build that was killed and is run
again finds that and does the rest. The order of units is the order of rows, however many processes share them and whichever is
done first.
"""

import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any

import xxhash

from shoal.comm.parentdeath import die_with_parent
from shoal.core.clock import Deadline
from shoal.core.errors import RequestError, RunError, ShoalError
from shoal.data.storage.protocol import Missing
from shoal.data.store.blockwriter import BlockOptions, WrittenBlock, write_blocks
from shoal.data.store.errors import BrokenFile
from shoal.data.store.folder import BLOCKS, BUILDING, StoreFolder, block_name
from shoal.data.store.manifest import FileRef
from shoal.data.store.schema import schema_values
from shoal.data.store.sealed import seal, unseal
from shoal.data.table import Schema, Table

UNIT_SECONDS = 3600.0
"""The longest time in which no process finishes a unit."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Rows that one process reads."""

    name: str
    """Where they come from, for people: a file, or a part of one."""
    open: Callable[[], Iterable[Table]]
    """Reads them, from the first on."""
    fingerprint: str = ""
    """Differs where what is read differs: size and time of a file. Units of another fingerprint are done anew."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """All units of a build, and what they become."""

    folder: StoreFolder
    units: Sequence[Unit]
    schema: Schema
    options: BlockOptions

    @property
    def digest(self) -> str:
        """Of everything that the blocks depend on."""
        said = [
            schema_values(self.schema),
            self.options.target_bytes,
            self.options.codec,
            [(unit.name, unit.fingerprint) for unit in self.units],
        ]
        return xxhash.xxh3_128(json.dumps(said).encode("utf-8", "surrogatepass")).hexdigest()


def run_units(
    job: Job, *, workers: int, on_done: Callable[[int], None] = lambda done: None, deadline_s: float = UNIT_SECONDS
) -> list[list[WrittenBlock]]:
    """Do every unit that is not done yet, in so many processes; the blocks of each unit, in order.

    Args:
        job: the units.
        workers: processes; with 1, this one does everything.
        on_done: told how many units are done, from time to time.
        deadline_s: how long nothing may become done before that is an error.

    Raises:
        RequestError: a unit cannot be read, or has other columns than the first.
        RunError: a process died, or nothing was done in time.
    """
    digest = job.digest
    done: dict[int, list[WrittenBlock]] = {}
    for number in range(len(job.units)):
        if (blocks := _read_result(job, digest, number)) is not None:
            done[number] = blocks
    on_done(len(done))
    left = [number for number in range(len(job.units)) if number not in done]
    if workers == 1 or len(left) <= 1:
        for number in left:
            done[number] = _do_unit(job, digest, number)
            on_done(len(done))
        return [done[number] for number in range(len(job.units))]
    _run_processes(job, digest, left, workers, lambda count: on_done(len(done) + count), deadline_s)
    for number in left:
        blocks = _read_result(job, digest, number)
        if blocks is None:
            raise RunError(
                f"{job.units[number].name} was done, and {BUILDING}/ says nothing of it; run the build again"
            )
        done[number] = blocks
    return [done[number] for number in range(len(job.units))]


def _run_processes(
    job: Job, digest: str, left: Sequence[int], workers: int, on_done: Callable[[int], None], deadline_s: float
) -> None:
    # Forked: units are functions, and nothing of them has to be sent. Numbers of units and errors go through pipes as text.
    context = multiprocessing.get_context("fork")
    waiting = list(reversed(left))
    running: dict[Connection, tuple[ForkProcess, int]] = {}
    sys.stdout.flush()
    sys.stderr.flush()
    count = 0
    try:
        for _ in range(min(workers, len(left))):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(job, digest, theirs, os.getpid()), daemon=True)
            process.start()
            theirs.close()
            number = waiting.pop()
            running[ours] = process, number
            ours.send_bytes(str(number).encode())
        while running:
            ready = wait(list(running), timeout=deadline_s)
            if not ready:
                busy = ", ".join(job.units[number].name for _, number in running.values())
                raise RunError(f"no unit was done in {deadline_s:g} s; {len(running)} processes are at {busy}")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                process, number = running[pipe]
                _check_answer(pipe, process, job.units[number])
                count += 1
                on_done(count)
                if waiting:
                    running[pipe] = process, waiting.pop()
                    pipe.send_bytes(str(running[pipe][1]).encode())
                else:
                    pipe.send_bytes(b"")
                    process.join()
                    del running[pipe]
    finally:
        for pipe, (process, _) in running.items():
            pipe.close()
            process.kill()
            process.join()


def _check_answer(pipe: Connection, process: ForkProcess, unit: Unit) -> None:
    try:
        answer = pipe.recv_bytes().decode()
    except (EOFError, OSError) as error:
        limit = Deadline(seconds=5)
        process.join(limit.remaining)
        raise RunError(
            f"the process that wrote {unit.name} died (exit code {process.exitcode}); run the build again: what is done is kept"
        ) from error
    kind, _, message = answer.partition(" ")
    if kind != "done":
        raise (RequestError if kind == "request" else RunError)(message)


def _serve(job: Job, digest: str, pipe: Connection, parent: int) -> None:
    """One process: units by their numbers, until there are no more."""
    die_with_parent(parent)
    while number := pipe.recv_bytes():
        try:
            _do_unit(job, digest, int(number))
            answer = "done "
        except RequestError as error:
            answer = f"request {error}"
        except (ShoalError, OSError) as error:
            answer = f"run {error}"
        pipe.send_bytes(answer.encode("utf-8", "replace"))


def _do_unit(job: Job, digest: str, number: int) -> list[WrittenBlock]:
    unit = job.units[number]
    blocks = list(write_blocks(job.folder, unit.open(), job.schema, job.options, source=unit.name))
    values = {
        "unit": unit.name,
        "blocks": [[block.ref.digest, block.ref.num_bytes, block.ref.num_rows, block.stats] for block in blocks],
    }
    job.folder.storage.replace(_result_path(job, digest, number), seal(values))
    return blocks


def _read_result(job: Job, digest: str, number: int) -> list[WrittenBlock] | None:
    """What a unit became in an earlier run, where all of it is still there."""
    path = _result_path(job, digest, number)
    try:
        values, _ = unseal(job.folder.storage.read(path), file=path)
        blocks = [_read_written(found) for found in values["blocks"]]
        for block in blocks:
            entry = job.folder.storage.stat(job.folder.path(BLOCKS, block_name(block.ref.digest)))
            if entry.size != block.ref.num_bytes:
                return None
    except (Missing, BrokenFile):
        return None
    return blocks


def _read_written(values: Any) -> WrittenBlock:
    digest, num_bytes, num_rows, stats = values
    return WrittenBlock(ref=FileRef(digest=digest, num_bytes=num_bytes, num_rows=num_rows), stats=stats)


def _result_path(job: Job, digest: str, number: int) -> str:
    return job.folder.path(BUILDING, digest[:16], f"unit-{number:06d}.json")
