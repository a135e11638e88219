"""A process of a script's own run: its place among the others, its plan and its request to stop."""

import signal
import threading
from dataclasses import replace
from typing import Any

import torch

from shoal.comm.mesh import pretend_mesh
from shoal.comm.world import World
from shoal.core.axes import Axis
from shoal.core.errors import RequestError
from shoal.core.plan import Plan
from shoal.engine.stop import StopRequest

IS_RUNNING = threading.Event()
"""Set while this process is inside a ``Run``, which then tells the supervisor what it does."""

OPEN: "list[RunProcess]" = []
"""The run that this process is inside of, if any."""


class RunProcess:
    """What a rank knows of itself and of the others, whatever it trains."""

    world: World
    plan: Plan
    stop: StopRequest
    status: str
    _former_handler: Any

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
            plan = replace(plan, dp=max(1, self.world.size // max(1, plan.ranks_per_replica)))
        plan.check(world_size=self.world.size)
        return plan

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

    def _replica(self) -> tuple[int, int]:
        """This rank's replica, and how many there are."""
        mesh = pretend_mesh(self.plan, self.rank)
        return mesh.coordinate(Axis.DATA), mesh.degree(Axis.DATA)
