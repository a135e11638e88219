"""A process's place in a run with parameter servers: what every role is told at its start, and how it meets the others.

On one machine the processes share a folder, which has their sockets, their arenas and the lease of the center. On several they
have a list of addresses instead (``cluster.py``).
"""

import argparse
import faulthandler
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.comm.parentdeath import end_if_forked
from shoal.comm.wire.node import Node
from shoal.core.config import read_toml, validate
from shoal.core.errors import EXIT_DONE, EXIT_NO, EXIT_WRONG_REQUEST, RequestError
from shoal.core.plan import Plan
from shoal.core.rundir import RunDir
from shoal.core.updaterule import UpdateRule
from shoal.elastic.election.elector import Center
from shoal.elastic.election.filelease import read_center
from shoal.elastic.election.seeker import Seeker
from shoal.elastic.view import Role
from shoal.engine.resolve import default_threads
from shoal.paramserver.center.candidate import CLUSTER_OPERATIONS
from shoal.paramserver.messages import OPERATIONS, Join
from shoal.paramserver.sharding import Model
from shoal.serverrun.cluster import Cluster
from shoal.serverrun.notices import DroppedMessages
from shoal.telemetry.eventlog import append_event
from shoal.telemetry.measurements import RankLocation
from shoal.telemetry.statusboard import RankStatus, StatusBoard
from shoal.trainer.claim import flatten, read_plan
from shoal.trainer.config import Recipe


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """See the module."""

    name: str
    rank: int
    num_ranks: int
    """Of all roles together; the size of the board."""
    instance_id: str
    folder: Path | None = None
    """Sockets, leases and arenas of this run on this machine; None in a cluster."""
    cluster: Cluster | None = None
    """None on one machine."""
    run_dir: Path | None
    """None for a worker in a cluster, which leaves nothing behind."""
    resume: bool
    """Begin with the newest whole checkpoint, if there is one."""
    recipe: Recipe
    plan: Plan
    board_fd: int | None = None
    origin: str = ""
    """Names the process over its instances, where nobody sees to it that there is one of each name."""
    run: str = ""
    """The run that it belongs to (``core/rundir.py``); empty for a worker that has not been in it yet."""
    is_held: bool = False
    """The run directory is held, and the end is told, by whoever started this role; true with ``shoal train --hosts``."""
    group_rank: int = 0
    """Of a process of a worker that is a group of several: 0 is the worker to everyone else, the others serve it."""

    @property
    def kept_dir(self) -> Path:
        """The run directory of a role that cannot do without one."""
        assert self.run_dir is not None, f"{self.name} needs a run directory"
        return self.run_dir

    @property
    def lease_folder(self) -> Path:
        """Where centers are elected, on one machine."""
        assert self.folder is not None
        return self.folder / "lease"

    @property
    def address(self) -> str:
        """Where this process listens. In a folder its instance is in it: whoever calls the one before must not reach this one.
        A machine's address stays the same, and there the epoch of a request tells."""
        if self.cluster is not None:
            return self.cluster.listen
        return f"ipc://{self.folder}/{self.name}-{self.instance_id}.sock"

    @property
    def index(self) -> int:
        """The number at the end of the name: of a worker, the share that it prefers."""
        return int(self.name.rpartition("-")[2].partition(".")[0])

    @property
    def group_store(self) -> Path:
        """The file through which the ranks of a worker meet. They have one instance, so a group that is started again never
        meets one before it."""
        assert self.folder is not None, "a group is of one machine"
        return self.folder / f"group-{self.name.partition('.')[0]}-{self.instance_id}"

    @property
    def rule(self) -> UpdateRule:
        """The update rule, resolved."""
        return UpdateRule.parse(self.plan.update or "bsp").resolve(self.plan.num_shares)

    @property
    def threads(self) -> int:
        """Compute threads: the machine's, shared with the others of a job; a role that starts by itself has them all."""
        return self.recipe.train.threads or default_threads(self.plan.world_size if self.cluster is None else 1)

    @property
    def settings(self) -> dict[str, str]:
        """What this process's recipe says of everything that all must agree on."""
        return shared_settings(self.recipe)


def open_node(spec: ProcessSpec) -> Node:
    """This process on the wire; what it drops is written down until it is closed."""
    if spec.cluster is None:
        node = Node(instance_id=spec.instance_id, operations=OPERATIONS, arena_dir=spec.folder)
    else:
        node = Node(instance_id=spec.instance_id, operations=CLUSTER_OPERATIONS, keys=spec.cluster.keys)
    node.spawn(DroppedMessages(node, name=spec.name, run_dir=spec.run_dir, rank=spec.rank).keep())
    return node


def introduction(spec: ProcessSpec, *, role: Role, model: Model, data: Mapping[str, str]) -> Join:
    """What a server or a worker says to each center that it meets, without its address and the view that it has by then.

    Args:
        spec: this process.
        role: what it is.
        model: the trained parameters as it has them.
        data: the data as it has it.
    """
    return Join(
        name=spec.name,
        role=role,
        address="",
        model={name: (tensor.shape, tensor.dtype) for name, tensor in model.items()},
        settings=spec.settings,
        data=dict(data),
        origin=spec.origin,
        started=time.time(),
        run=spec.run,
    )


def open_finder(spec: ProcessSpec, node: Node) -> Callable[[], Center | None]:
    """What tells who is the center; in a cluster it asks in the background, until the node is closed."""
    if spec.cluster is None:
        folder = spec.lease_folder
        return lambda: read_center(folder)
    seeker = Seeker(node, spec.cluster.centers, search_seconds=spec.cluster.search_seconds, tell=_tell)
    seeker.start()
    return seeker.find


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def attach_status(spec: ProcessSpec) -> RankStatus | None:
    """This process's status on the job's board; None when nobody looks."""
    return None if spec.board_fd is None else StatusBoard.attach(spec.board_fd, spec.num_ranks).of_rank(spec.rank)


# What all processes of a run must agree on: every setting of the recipe but those that concern a process alone, as plain text.
#
# Compared at admission (``paramserver/center/center.py``). Processes on several machines each read a recipe of their own, and
# two that differ in a seed or a rate would train together without a word.

_OWN = (
    "telemetry",
    "eval",
    "elastic",
    "train.threads",
    "data.prefetch",
    "data.workers",
    "paramserver.hang_after",
    "paramserver.hang_seconds",
)
"""Sections and keys that may differ from process to process."""


def shared_settings(recipe: Recipe) -> dict[str, str]:
    """The settings that must be the same everywhere, by key; the plan is among them."""
    return {
        key: json.dumps(value)
        for key, value in sorted(flatten(recipe.model_dump(mode="json")).items())
        if value is not None and not any(key == name or key.startswith(f"{name}.") for name in _OWN)
    }


# The first and the last lines of a process of a job: what its command line says, and what its exit code means.
#
# This is a process boundary: every exception ends here, in the log and in the exit code. No torch: a center starts with this
# alone.


def read_spec(arguments: list[str]) -> tuple[str, ProcessSpec]:
    """What the command line says: which role, and its place in the run."""
    parser = argparse.ArgumentParser(prog="shoal.serverrun.job.role")
    parser.add_argument("role", choices=("server", "worker", "center"))
    parser.add_argument("--name", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--instance-id", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--group-rank", type=int, default=0)
    given = parser.parse_args(arguments)
    run_dir: Path = given.run_dir
    recipe = validate(Recipe, read_toml(RunDir(run_dir).recipe), origin=str(RunDir(run_dir).recipe))
    spec = ProcessSpec(
        name=given.name,
        rank=given.rank,
        num_ranks=given.ranks,
        instance_id=given.instance_id,
        folder=given.folder,
        run_dir=run_dir,
        resume=given.resume,
        recipe=recipe,
        plan=Plan.parse(read_plan(run_dir)),
        group_rank=given.group_rank,
        board_fd=int(os.environ["SHOAL_BOARD_FD"]) if "SHOAL_BOARD_FD" in os.environ else None,
    )
    return given.role, spec


def say_where(spec: ProcessSpec) -> None:
    """Write down on which host a process runs, if it has a run directory."""
    if spec.run_dir is not None:
        event = RankLocation(
            host=socket.gethostname(),
            device="cpu",
            local_rank=spec.rank,
            coordinates={},
            threads=spec.threads,
            pid=os.getpid(),
            name=spec.name,
        )
        append_event(RunDir(spec.run_dir).events(spec.rank), event, rank=spec.rank)


def _say_done(spec: ProcessSpec) -> None:
    """Tell the job that this process did what it was for: an exit code of 0 says only that something called exit."""
    rank_status = attach_status(spec)
    if rank_status is not None:
        rank_status.claim()  # A center had no use for it until now.
        rank_status.finish("completed")


def run_process(run: Callable[[str, ProcessSpec], None]) -> None:
    """Be a member of a job, and never return.

    Args:
        run: does the role's work.
    """
    owner = os.getpid()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # The job decides when to stop; Ctrl-C in the terminal goes to it alone.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    code = EXIT_DONE
    try:
        role, spec = read_spec(sys.argv[1:])
        say_where(spec)
        run(role, spec)
        end_if_forked(owner)
        _say_done(spec)
    except RequestError as error:
        print(f"error: {error}", file=sys.stderr)
        code = EXIT_WRONG_REQUEST
    except BaseException:
        end_if_forked(owner)
        traceback.print_exc()
        code = EXIT_NO
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: a thread in an unknown state could keep a dying process alive, and its peers waiting.
    os._exit(code)
