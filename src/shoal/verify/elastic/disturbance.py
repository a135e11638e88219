"""A callback that does to the ranks of an elastic run what a script says, and may plant a bug in them first."""

import os
import signal
import time
from collections.abc import Mapping

from torch import Tensor, nn

from shoal.core.axes import Axis
from shoal.core.clock import Deadline
from shoal.core.errors import RunError
from shoal.data.loading.loader import StepBatch
from shoal.engine.hooks import Hook, HookedModel, StepResult
from shoal.launch.environments import read_place
from shoal.launch.group.control import ControlBoard
from shoal.launch.group.elastic import CONTROL_VARIABLE, MEMBER_VARIABLE, SECOND_START
from shoal.trainer.elastic.rank import View
from shoal.verify.elastic.script import parse_script
from shoal.verify.mutants.elastic_bugs import BUGS

_ARRIVE_SECONDS = 90.0
_LOOK_SECONDS = 0.01


class Disturbance(Hook):
    """Dies where the script says, and waits where it says that others come.

    Args:
        script: such as ``4,3,1,4``.
        dp: of the plan.
        bug: to plant; empty for none.
    """

    def __init__(self, script: str, dp: int, bug: str = "") -> None:
        self._script = parse_script(script, dp=dp)
        self._place, self._present, self._is_first = 0, dp, True
        self._board: ControlBoard | None = None
        if CONTROL_VARIABLE not in os.environ:
            return  # Built to be looked at, before ranks are started.
        self._board = ControlBoard.attach(int(os.environ[CONTROL_VARIABLE]), read_place(os.environ).world_size)
        if SECOND_START in os.environ[MEMBER_VARIABLE]:
            self._await_deaths()
        if bug:
            for owner, name, value in BUGS[bug]():
                setattr(owner, name, value)

    def on_attach(self, model: HookedModel) -> None:
        """See ``Hook``."""
        mesh = model.mesh
        self._place, self._present = mesh.coordinate(Axis.DATA), mesh.degree(Axis.DATA)
        self._is_first = mesh.everyone.rank % (mesh.everyone.size // self._present) == 0

    def on_step_start(self, step: int, batch: StepBatch) -> None:
        """See ``Hook``."""
        for when, count in self._script.arrivals:
            if step == when and self._present < count:
                self._await(count)
        self._die(step, "start")

    def on_microbatch(self, step: int, index: int, loss: Tensor | None) -> None:
        """See ``Hook``."""
        self._die(step, "microbatch")

    def on_gradients(self, step: int, parameters: Mapping[str, nn.Parameter], loss_scale: float) -> None:
        """See ``Hook``."""
        self._die(step, "gradients")

    def on_update(self, step: int, result: StepResult) -> None:
        """See ``Hook``."""
        self._die(step, "update")

    def _die(self, step: int, point: str) -> None:
        for death in self._script.deaths:
            here = (death.step, death.present, death.place, death.point)
            if self._is_first and here == (step, self._present, self._place, point):
                os.kill(os.getpid(), signal.SIGKILL)

    def _await(self, count: int) -> None:
        assert self._board is not None, "ranks of an elastic run have one"
        limit = Deadline(seconds=_ARRIVE_SECONDS)
        while View.parse(self._board.read()[1]).num_replicas < count:
            if limit.is_over:
                raise RunError(f"the script waits for {count} replicas, which were not there in {limit.seconds:g} s")
            time.sleep(_LOOK_SECONDS)

    def _await_deaths(self) -> None:
        """Nobody comes before all have died who are to die: each death has an epoch of its own."""
        assert self._board is not None
        self._board.await_newer(self._script.num_early_deaths, Deadline(seconds=_ARRIVE_SECONDS))
