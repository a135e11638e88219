"""The process of a server: builds its shards, joins, and serves until the last update is applied and written down.

A job starts it on one machine (``serve``). On several machines it is started by itself (``run_server``): then it takes the run
directory, shows progress where it leads the log, and finalizes the run.
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import torch

from shoal.comm.wire.node import Node, new_instance_id
from shoal.comm.world import World
from shoal.core.errors import EXIT_DONE
from shoal.core.events import (
    RunStarted,
)
from shoal.core.place import Place
from shoal.core.rundir import identify, make_run_dir, withhold
from shoal.engine.reporting import Reporter
from shoal.paramserver.contact import Contact, Evicted
from shoal.paramserver.messages import FINISHED
from shoal.paramserver.server.server import Server
from shoal.serverrun.process import ProcessSpec, attach_status, introduction, open_finder, open_node
from shoal.serverrun.server.finalize import finalize_run
from shoal.serverrun.server.recorder import ServerRecorder
from shoal.serverrun.server.source import ShardSource
from shoal.serverrun.server.versions import follow_versions
from shoal.serverrun.standalone import run_async
from shoal.telemetry.display import Display, build_display
from shoal.telemetry.statusboard import Heartbeat, StatusBoard
from shoal.trainer.claim import Claim
from shoal.trainer.request import Prepared, already_finished
from shoal.trainer.summary import describe_summary

Conclude = Callable[[str], None]
"""Called, in a thread, with why the run was stopped (nothing when it was finished), when its last checkpoint is written."""


async def serve(
    spec: ProcessSpec,
    *,
    conclude: Conclude | None = None,
    make_source: "Callable[[ProcessSpec], ShardSource] | None" = None,
) -> str:
    """A server's life.

    Args:
        spec: this process.
        conclude: called on the server that leads the log in the end, while it is still a member.
        make_source: makes what shards are made of; left out, ``ShardSource``.

    Returns:
        Why the run was stopped; empty when it was finished.

    Raises:
        RunError: a shard cannot go on here, or the last checkpoint could not be written.
    """
    torch.set_num_threads(spec.threads)
    rank_status = attach_status(spec)
    beating = Heartbeat(rank_status) if rank_status is not None else None
    source = (make_source or ShardSource)(spec)
    world = World(Place(rank=spec.rank, world_size=spec.num_ranks), device=torch.device("cpu"), deadline_seconds=0.0)
    reporter = Reporter(
        spec.kept_dir,
        world=world,
        config=spec.recipe.telemetry,
        rank_status=rank_status,
        total_steps=source.total_steps,
    )
    try:
        spec = replace(spec, run=identify(spec.kept_dir))
        while True:
            node = open_node(spec)
            try:
                return await _serve(spec, source, reporter, node, conclude)
            except Evicted as error:
                if spec.cluster is None:
                    raise  # There is a job, which starts it again.
                print(f"taken for dead: {error}; coming back under a new name", file=sys.stderr, flush=True)
                spec = replace(spec, instance_id=new_instance_id(), resume=True)
                source.come_back(spec)
            finally:
                await node.close()
    finally:
        reporter.close()
        if beating is not None:
            beating.stop()


async def _serve(
    spec: ProcessSpec, source: "ShardSource", reporter: Reporter, node: Node, conclude: Conclude | None
) -> str:
    join = introduction(spec, role="server", model=source.model, data=source.same_data.fingerprint.as_settings())
    contact = Contact(
        node,
        find=open_finder(spec, node),
        introduce=lambda view: msgspec.structs.replace(join, view=view, address=address),
    )
    recorder = ServerRecorder(spec, source, reporter)
    server = Server(
        node,
        contact,
        make_shard=source.make_shard,
        make_copy=source.make_copy,
        make_log=source.make_log,
        rate=source.rate,
        on_update=recorder.take_update,
        deadline_seconds=spec.recipe.paramserver.deadline,
        go_back=recorder.go_back,
        on_not_finite=lambda identity, reason: recorder.take_refusal(contact.view, identity, reason),
    )
    address = await node.listen(spec.address, server.handle)
    contact.start()
    reporter.event(
        RunStarted(
            plan=str(spec.plan),
            world_size=spec.plan.world_size,
            step=source.start.step if source.start is not None else 0,
            generation=0,
            pid=0,
        )
    )
    following = asyncio.ensure_future(server.follow())
    looking = asyncio.ensure_future(follow_versions(server, source, reporter.event)) if source.follows else None
    try:
        while not following.done():
            contact.check()
            await asyncio.wait([following, server.failure], timeout=0.2, return_when=asyncio.FIRST_COMPLETED)
            recorder.look(server)
            if server.failure.done():
                server.failure.result()
            if looking is not None and looking.done():
                looking.result()
            is_needed = any(server.is_primary(shard) for shard in server.replicas)
            if contact.halt == FINISHED and not following.done() and not is_needed:
                # The last checkpoint is written, and nothing of this server's is in it: it came back too late to be needed.
                return contact.stopped
        following.result()
        await recorder.finish(server)
        if conclude is not None and server.is_primary(0):
            await asyncio.to_thread(conclude, contact.stopped)
        return contact.stopped
    finally:
        following.cancel()
        if looking is not None:
            looking.cancel()
        await asyncio.to_thread(recorder.close)
        if spec.cluster is not None:
            await contact.leave("it has ended")
        await contact.stop()
        await server.close()


_LOOK_SECONDS = 0.25
"""How often a server that was started by itself looks for progress to show."""


def run_server(spec: ProcessSpec, prepared: Prepared) -> tuple[int, dict[str, Any] | None]:
    """Be a server to the end of the run.

    Returns:
        The exit code, and the summary where this server wrote it.

    Raises:
        RequestError: the run directory is somebody else's, or the center does not let this server in.
        RunError: it cannot go on.
    """
    finished = already_finished(prepared)
    if finished is not None:
        print(f"{spec.kept_dir} has completed its {finished['steps']} steps; nothing to do", file=sys.stderr)
        return EXIT_DONE, finished
    if spec.recipe.publish.is_on and spec.rank == 0:
        print(
            "warning: [publish] has no effect where roles are started by themselves; `shoal serve` reads the newest checkpoint",
            file=sys.stderr,
        )
    # The folder belongs to the first server; the others write into it what all of them have agreed on.
    readers = spec.recipe.run.readable_by
    withhold(readers)
    claim = Claim(spec.kept_dir, readers=readers) if spec.rank == 0 and not spec.is_held else None
    if claim is not None:
        claim.write(prepared.recipe, spec.plan)
    make_run_dir(spec.kept_dir, readers)
    started, written = time.time(), list[dict[str, Any]]()

    def conclude(halt: str) -> None:
        written.append(finalize_run(spec, halt, total_steps=prepared.setup.total_steps, started=started))

    board = StatusBoard.create(spec.num_ranks)
    seen = replace(spec, board_fd=board.fd)
    display = build_display(sys.stderr, every=spec.recipe.telemetry.progress_every)

    async def work() -> str:
        showing = asyncio.ensure_future(_show(board, display))
        try:
            return await serve(seen, conclude=conclude)
        finally:
            showing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await showing

    try:
        code = run_async(work)
    finally:
        display.update(board.read())
        display.close()
        if claim is not None:
            claim.release()
    if written and not spec.is_held:
        print(describe_summary(written[-1], spec.kept_dir))
    return code, written[-1] if written else None


async def _show(board: StatusBoard, display: Display) -> None:
    while True:
        # The display shows the first, and only the server that leads the log has numbers.
        display.update(sorted(board.read(), key=lambda state: -int(state.metrics.get("step", -1))))
        await asyncio.sleep(_LOOK_SECONDS)
