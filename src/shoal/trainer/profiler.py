"""The run profiler: what a run that has a forecast really did, measured on every rank while it trains.

One step's traffic is read, every step is timed, and with a pipeline every cell is asked how long it waited. Runs without a
forecast have none of this.
"""

import statistics
import time
from contextlib import ExitStack
from typing import Any

import torch

from shoal.comm.trafficcounter import TrafficCounts, plain_traffic
from shoal.data.loading.loader import StepBatch
from shoal.engine.hooks import Hook, StepResult
from shoal.engine.model import ParallelModel
from shoal.engine.sizes import measure_state
from shoal.schedules.schedule import Action

_AXES = ("tp", "cp", "dp", "pp", "replicas", "everyone")
_OPERATIONS = (
    "all_reduce",
    "all_reduce_max",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "ring_shift",
    "broadcast",
    "send",
    "share",
)
_KEYS = [(axis, operation) for axis in _AXES for operation in _OPERATIONS]
_COUNTED = 2
"""The step whose traffic is read, from 0: the first of those that are all alike."""
_STATE = ("weights", "gradients", "optimizer")


class RunProfiler(Hook):
    """Measures the steps of one rank."""

    def __init__(self, engine: ParallelModel) -> None:
        self._engine = engine
        self._moved: TrafficCounts = {}
        self._seconds: list[float] = []
        self._busy: list[float] = []
        self._spans: list[float] = []
        self._cells: list[tuple[float, float, float]] = []
        self._started = 0.0
        self._counting = ExitStack()
        engine.add_hook(self)

    def on_step_start(self, step: int, batch: StepBatch) -> None:
        """Begin to time, and in one step to count."""
        self._cells = []
        if len(self._seconds) == _COUNTED:
            self._moved = self._counting.enter_context(self._engine.mesh.traffic.counting())
        self._started = time.perf_counter()

    def on_action(self, action: Action, begin: float, waited: float, end: float) -> None:
        """Note how long a cell of the schedule took, and how long it waited."""
        self._cells.append((begin, waited, end))

    def on_update(self, step: int, result: StepResult) -> None:
        """End the step's time and count."""
        self._seconds.append(time.perf_counter() - self._started)
        self._counting.close()
        if self._cells:
            self._busy.append(sum(end - begin - waited for begin, waited, end in self._cells))
            self._spans.append(self._cells[-1][2] - self._cells[0][0])

    def measured(self) -> dict[str, Any]:
        """What was seen on all ranks; they call it together, and each gets the same answer."""
        world = self._engine.world
        state = measure_state(self._engine)
        counts = [number for key in _KEYS for number in _numbers(plain_traffic(self._moved), key)]
        whole = torch.tensor([*counts, *(state[name] for name in _STATE)], dtype=torch.int64, device=world.device)
        times = [_median(self._seconds[_COUNTED:]), _median(self._busy[_COUNTED:]), _median(self._spans[_COUNTED:])]
        spent = torch.tensor(times, dtype=torch.float64, device=world.device)
        ranks = [tensor.tolist() for tensor in world.all_gather(whole)]
        clocks = [tensor.tolist() for tensor in world.all_gather(spent)]
        span = max(clock[2] for clock in clocks)
        return {
            "seconds": max(clock[0] for clock in clocks),
            "bubble": 1.0 - statistics.mean(clock[1] for clock in clocks) / span if span > 0 else None,
            "num_steps": len(self._seconds),
            "ranks": [_page(numbers) for numbers in ranks],
        }


def _numbers(moved: TrafficCounts, key: tuple[str, str]) -> tuple[int, int]:
    found = moved.get(key)
    return (found.calls, found.num_bytes) if found is not None else (0, 0)


def _page(numbers: list[int]) -> dict[str, Any]:
    traffic = {
        f"{axis} {operation}": numbers[2 * place : 2 * place + 2]
        for place, (axis, operation) in enumerate(_KEYS)
        if numbers[2 * place]
    }
    state = dict(zip(_STATE, numbers[-len(_STATE) :], strict=True))
    return {"state_bytes": state, "traffic": dict(sorted(traffic.items()))}


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0
