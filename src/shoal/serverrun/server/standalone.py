"""A server that was started by itself: takes the run directory, shows progress where it leads the log, and closes the run."""

import asyncio
import contextlib
import sys
import time
from dataclasses import replace
from typing import Any

from shoal.core.errors import EXIT_DONE
from shoal.core.rundir import make_run_dir, withhold
from shoal.serverrun.process import ProcessSpec
from shoal.serverrun.server.finalize import finalize_run
from shoal.serverrun.server.process import serve
from shoal.serverrun.standalone import run_async
from shoal.telemetry.live import build_display
from shoal.telemetry.progress import Display
from shoal.telemetry.statusboard import StatusBoard
from shoal.trainer.claim import Claim
from shoal.trainer.request import Prepared, already_finished
from shoal.trainer.summary import describe_summary

_LOOK_SECONDS = 0.25


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
    # The folder belongs to the first server; the others write into it what all of them have agreed on.
    readers = spec.recipe.run.readable_by
    withhold(readers)
    claim = Claim(spec.kept_dir, readers=readers) if spec.rank == 0 else None
    if claim is not None:
        claim.write(prepared.recipe, spec.plan)
    make_run_dir(spec.kept_dir, readers)
    started, written = time.time(), list[dict[str, Any]]()

    def conclude(halt: str) -> None:
        written.append(finalize_run(spec, halt, total_steps=prepared.total_steps, started=started))

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
    if written:
        print(describe_summary(written[-1], spec.kept_dir))
    return code, written[-1] if written else None


async def _show(board: StatusBoard, display: Display) -> None:
    while True:
        # The display shows the first, and only the server that leads the log has numbers.
        display.update(sorted(board.read(), key=lambda state: -int(state.metrics.get("step", -1))))
        await asyncio.sleep(_LOOK_SECONDS)
