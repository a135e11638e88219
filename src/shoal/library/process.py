"""A process of a script's own run: its place among the others, its plan and its request to stop."""

import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shoal.comm.mesh import pretend_mesh
from shoal.comm.world import World
from shoal.core.axes import Axis
from shoal.core.compressrule import CompressRule
from shoal.core.errors import RequestError
from shoal.core.plan import Plan
from shoal.core.rundir import make_run_dir
from shoal.core.syncrule import SyncRule
from shoal.engine.stop import StopRequest
from shoal.library.arguments import explain_missing
from shoal.replicas.config import ReplicaConfig
from shoal.replicas.refusals import replica_problems
from shoal.telemetry.statusboard import RankStatus

PLAN_VARIABLE = "SHOAL_PLAN"
"""The plan, where ``shoal run`` hands it down."""
RUN_DIR_VARIABLE = "SHOAL_RUN_DIR"
RESUME_VARIABLE = "SHOAL_RESUME"

IS_RUNNING = threading.Event()
"""Set while this process is inside a ``Run``, which then tells the supervisor what it does, and when it is ``OWN_WORK``."""

OWN_WORK = "script"
"""The phase of a rank that is in code of the script, of which nobody knows how long it takes."""
_OF_ENTERED = ("world", "plan", "_reporter")

OPEN: "list[RunProcess]" = []
"""The run that this process is inside of, if any."""


def read_plan(given: object) -> Plan:
    """The plan of a run: a ``Plan``, its text, or the empty one where nothing is given.

    Raises:
        RequestError: it is none of them, or the text is wrong.
    """
    plan = Plan.parse(given) if isinstance(given, str) else given
    if plan is None:
        return Plan()
    if isinstance(plan, Plan):
        if Plan.parse(str(plan)) != replace(plan, microbatches=Plan.parse(str(plan)).microbatches):
            raise RequestError(
                f"plan {plan!r} holds a value of another type, such as text in the place of a number; write "
                f"shoal.Plan.parse({str(plan)!r})"
            )
        if plan.compress is not None and CompressRule.parse(plan.compress).kind in ("dgc", "onebit"):
            raise RequestError(
                f"plan {str(plan)!r}: compress={plan.compress} has a momentum and a clipping of its own, which a script's "
                "optimizer and max_norm would double; use compress=int8 or topk:0.01, or train a recipe (`shoal train`)"
            )
        return plan
    raise RequestError(f"plan={given!r} is no plan; give its text, such as 'dp=2 zero=1', or a shoal.Plan")


def open_run_dir(path: Path) -> None:
    """Make the run directory where there is none.

    Raises:
        RequestError: a file is in its place, or the disk refuses it.
    """
    try:
        make_run_dir(path)
    except OSError as error:
        raise RequestError(f"run_dir {path} cannot be made: {error.strerror}; give another folder") from error


def refuse_replica_settings(plan: Plan, config: ReplicaConfig) -> None:
    """Refuse settings of ``replicas=`` that the plan's ``sync`` cannot carry out, as a recipe's ``[replicas]`` is refused.

    Raises:
        RequestError: lists them with their fixes.
    """
    if plan.sync == "allreduce":
        return
    # A script evaluates when it likes, and its steps are its own to leave out.
    found = list(replica_problems(config, SyncRule.parse(plan.sync), evaluate_every=1, leaves_out=False))
    if found:
        raise RequestError("\n".join(f"plan {str(plan)!r}: {problem}" for problem in found))


class RunProcess:
    """What a rank knows of itself and of the others, whatever it trains."""

    world: World
    """The processes: ``run.world.barrier()`` waits for all of them."""
    plan: Plan
    """With all its degrees, once the run has begun."""
    stop: StopRequest
    """This rank's request to stop: ``run.stop.request("reason")``."""
    status: str
    """``completed``, or ``interrupted`` after a signal."""
    _former_handler: Any
    _status: RankStatus | None

    def __getattr__(self, name: str) -> Any:
        """Only for what is missing.

        Raises:
            RequestError: the run has not been entered, so it has no processes yet.
        """
        if name in _OF_ENTERED:
            raise RequestError(
                "the run has not begun, and knows no processes yet: use `with shoal.Run(...) as run:`, or shoal.Run(...).start()"
            )
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}{explain_missing(name, dir(type(self)))}"
        )

    def _fit(self, plan: Plan) -> Plan:
        """The plan with the processes that there are.

        Raises:
            RequestError: it does not fit them.
        """
        if plan.ps:
            raise RequestError(
                f"plan {str(plan)!r}: parameter servers run recipes (`shoal train`), not a script's own loop; use a plan with dp"
            )
        if plan.dp is None:
            plan = replace(plan, dp=max(1, self.world.size // max(1, plan.ranks_per_replica * plan.islands)))
        plan.check(world_size=self.world.size)
        return plan.with_islands

    def _listen(self) -> None:
        """Let SIGTERM ask to stop; python takes signals on its main thread only."""
        self._former_handler = None
        try:
            self._former_handler = signal.getsignal(signal.SIGTERM)
            self.stop.listen((signal.SIGTERM,))
        except ValueError:
            self._former_handler = None

    def close(self) -> None:
        """Finish, on all ranks together."""
        raise NotImplementedError

    @property
    def rank(self) -> int:
        """This process's number, from 0."""
        return self.world.rank

    @property
    def world_size(self) -> int:
        """Processes of the run."""
        return self.world.size

    @property
    def is_main(self) -> bool:
        """True on the rank that prints."""
        return self.world.is_first

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors are."""
        return self.world.device

    @property
    def is_stopping(self) -> bool:
        """True when all ranks have agreed to stop; loaders then end."""
        return self.stop.agreed is not None

    def print(self, *values: object) -> None:
        """Print once, not once per rank."""
        if self.is_main:
            print(*values, flush=True)

    def _leave(self) -> None:
        """Tell the supervisor that what comes next is the script's own work."""
        self._reporter.clock.leave(OWN_WORK)

    def _was_signalled(self) -> bool:
        """True on every rank when a signal asked any of them to stop. All ranks call it together, after they agreed to stop.

        A request of the script's own, of which other ranks know only that there was one, is no interruption.
        """
        heard = torch.tensor([int(self.stop.signal_number > 0)], dtype=torch.int64, device=self.device)
        return int(self.world.all_reduce_(heard)) > 0

    def _replica(self) -> tuple[int, int]:
        """This rank's replica, and how many there are."""
        mesh = pretend_mesh(self.plan, self.rank)
        return mesh.replica, mesh.degree(Axis.ISLAND) * mesh.degree(Axis.DATA)
