"""A role that starts by itself, on one of several machines: everything that can be known to be wrong, and how its process ends.

No torch: a wrong address or a missing key is answered at once, before anything listens.
"""

import asyncio
import faulthandler
import os
import signal
import socket
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from shoal.checkpoint.whole import committed_names
from shoal.comm.wire.connections import raise_descriptor_limit
from shoal.comm.wire.errors import Refused, WireTimeout
from shoal.comm.wire.node import Node, new_instance_id
from shoal.core.errors import EXIT_DONE, RequestError, RunError
from shoal.core.rundir import RunDir
from shoal.elastic.election.elector import Center
from shoal.elastic.election.etcd import EtcdAccess
from shoal.elastic.election.seeker import Seeker
from shoal.launch.blame import EXIT_INTERRUPTED
from shoal.launch.supervisor import stop_signals
from shoal.paramserver.center.candidate import CLUSTER_OPERATIONS
from shoal.paramserver.messages import Halt
from shoal.serverrun.cluster import Cluster, check_candidate, read_cluster
from shoal.serverrun.process import ProcessSpec
from shoal.trainer.claim import check_claim
from shoal.trainer.config import Recipe
from shoal.trainer.request import OwnParts, Prepared, TrainRequest, check_parts, read_request


@dataclass(frozen=True, kw_only=True)
class RoleRequest:
    """What the user asked for, as given."""

    role: Literal["center", "server", "worker"]
    recipe: Path
    centers: str
    plan: str | None = None
    overrides: tuple[str, ...] = ()
    index: int = 0
    """Of a server or a worker among its like; a center's is its place in the list."""
    listen: str = ""
    keys: Path | None = None
    allow: Path | None = None
    etcd: str = ""
    """Where a center is elected; empty: among the centers themselves."""
    run_dir: Path | None = None
    resume: bool = False
    is_held: bool = False
    """See ``ProcessSpec``."""


@dataclass(frozen=True, kw_only=True)
class PreparedRole:
    """A request that was checked."""

    spec: ProcessSpec
    prepared: Prepared | None
    """Of the whole run, for those who train; None for a center."""


def prepare_role(request: RoleRequest, *, own: OwnParts) -> PreparedRole:
    """Check what a role was asked to be.

    Args:
        request: what the user asked for.
        own: builds the user's own data and module where the recipe names them; a center does not ask.

    Raises:
        RequestError: one message with the numbers and the fix.
    """
    asked = TrainRequest(recipe=request.recipe, plan=request.plan, overrides=request.overrides)
    recipe, plan, layout = read_request(asked)
    if not plan.ps:
        raise RequestError(
            f"plan {str(plan)!r} has no parameter servers, so there is no {request.role}; write --plan 'ps=2 workers=2'"
        )
    if plan.ranks_per_replica > 1:
        raise RequestError(
            f"plan {str(plan)!r}: a worker is a group of {plan.ranks_per_replica} processes, and roles that start by themselves "
            f"are one process each; leave tp, cp and pp out, or run it on one machine with shoal train"
        )
    cluster = read_cluster(
        centers=request.centers,
        listen=request.listen,
        keys=request.keys,
        allow=request.allow,
        etcd=request.etcd,
        etcd_access=EtcdAccess.of(recipe.elastic),
        search_seconds=recipe.elastic.start_deadline,
    )
    index = request.index
    if request.role == "center":
        check_candidate(cluster)
        index = cluster.index
    run_dir = request.run_dir
    if request.role == "server":
        assert run_dir is not None, "the command asks for it"
        check_server_folder(run_dir, recipe, resume=request.resume)
    prepared = None
    if request.role != "center":
        prepared = check_parts(recipe, plan, layout, run_dir=run_dir or Path(), resume=request.resume, own=own)
    instance_id = new_instance_id()
    return PreparedRole(
        spec=ProcessSpec(
            name=f"{request.role}-{index}",
            rank=index,
            num_ranks=max(layout.plan.world_size, index + 1),
            instance_id=instance_id,
            origin=f"process {os.getpid()} on {socket.gethostname()} ({instance_id})",
            cluster=cluster,
            run_dir=run_dir,
            resume=request.resume,
            is_held=request.is_held,
            recipe=recipe,
            plan=layout.plan,
        ),
        prepared=prepared,
    )


def check_server_folder(run_dir: Path, recipe: Recipe, *, resume: bool) -> None:
    """Refuse a run directory that holds something else, or something that was not asked to go on.

    The servers of a run come one after the other into the same folder, so one that only has the recipe is as good as empty.

    Raises:
        RequestError: it is a file, holds another recipe, or a run that has a checkpoint and ``--resume`` was not given.
    """
    check_claim(run_dir, recipe, resume=True)
    run = RunDir(run_dir)
    if not resume and (run.summary.exists() or committed_names(run.checkpoints)):
        raise RequestError(
            f"{run_dir} already holds a run of this recipe; add --resume to go on, or use another --run-dir"
        )


def run_async(work: Callable[[], Coroutine[Any, Any, str]]) -> int:
    """Do a role's work on an event loop; a first signal ends it in order, a second at once.

    Args:
        work: returns why the run was stopped, and nothing when it was finished.

    Returns:
        The exit code.
    """

    _begin()

    async def go() -> int:
        loop = asyncio.get_running_loop()
        task = loop.create_task(work())
        caught: list[int] = []
        awaited = _awaited_signals()

        def stop(number: int) -> None:
            caught.append(number)
            for each in awaited:
                loop.remove_signal_handler(each)
            task.cancel()

        for number in awaited:
            loop.add_signal_handler(number, stop, number)
        try:
            halt = await task
        except asyncio.CancelledError:
            if not caught:
                raise
            return 128 + caught[0]
        return EXIT_INTERRUPTED if halt else EXIT_DONE

    return asyncio.run(go())


class Stopped(BaseException):
    """A signal came; not an error that anybody handles on the way out."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def run_blocking(work: Callable[[], str]) -> int:
    """Do a role's work in this thread; see ``run_async``."""

    awaited = _awaited_signals()

    def stop(number: int, frame: FrameType | None) -> None:
        for each in awaited:
            signal.signal(each, signal.SIG_DFL)
        raise Stopped(number)

    _begin()
    for number in awaited:
        signal.signal(number, stop)
    try:
        halt = work()
    except Stopped as stopped:
        return 128 + stopped.number
    return EXIT_INTERRUPTED if halt else EXIT_DONE


def _awaited_signals() -> list[signal.Signals]:
    """Those by which this role is asked to leave, but for what its starter had it ignore: that one stops it by the center."""
    return [number for number in stop_signals() if signal.getsignal(number) is not signal.SIG_IGN]


def _begin() -> None:
    """A process that hangs on another machine says where on SIGUSR1; and it has as many descriptors as its user may have."""
    raise_descriptor_limit()
    faulthandler.register(signal.SIGUSR1, all_threads=True)


# Stopping a run on several machines: a word to the center, whoever it is, and every role ends after what is under way.

_CALL_SECONDS = 2.0
_LOOK_SECONDS = 0.05


async def stop_run(cluster: Cluster, *, reason: str, seconds: float) -> Center:
    """Ask the center to end the run with a checkpoint.

    Returns:
        The center that took it.

    Raises:
        RequestError: the centers refuse this process's key.
        RunError: no center took it in time.
    """
    node = Node(instance_id=new_instance_id(), operations=CLUSTER_OPERATIONS, keys=cluster.keys)
    seeker = Seeker(node, cluster.centers, search_seconds=seconds)
    seeker.start()
    until = time.monotonic() + seconds
    try:
        while True:
            center = seeker.find()
            if center is not None:
                try:
                    await node.connect(center.address).call(Halt(reason=reason), deadline=_CALL_SECONDS)
                    return center
                except (WireTimeout, Refused):
                    pass  # It leads no longer: look again.
            if time.monotonic() > until:
                raise RunError(f"no center took the word to stop within {seconds:g} s: {seeker.describe()}")
            await asyncio.sleep(_LOOK_SECONDS)
    finally:
        await node.close()
