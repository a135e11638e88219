"""What each unit of a model costs, read off recorded forward passes: measured by a clock, or counted.

Counted costs are the same numbers in every process, at every start. What an asynchronous pipeline computes depends on where it
is cut, and every rank has to cut at the same places, so a clock is no basis for a cut that nobody wrote down.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shoal.core.errors import RequestError
from shoal.costs.operations import is_view
from shoal.costs.tracer import Call, Level, ModuleCall, ModuleReturn, Record, Saved, Tracer, preserved_state, tensors_in
from shoal.data.batchform import arguments_of
from shoal.pipeline.split import UnitCost
from shoal.pipeline.units import Unit

NUM_TIMED = 3
FORWARDS_PER_STEP = 3
"""A forward pass, and a backward pass that takes twice as long: two matrix products for each of the forward's."""
OPERATIONS_PER_SECOND = 50_000_000_000
"""Of a processor core of these years; only ratios matter to a cut."""
OPERATIONS_PER_BYTE = 8
"""In the time in which an operation that is no matrix product reads or writes a byte, a product does so many."""


@dataclass
class _UnitUse:
    """What one call of a unit did, with what ran until the next: a stage ends where the first unit of the next one is called."""

    path: str
    seconds: float = 0.0
    operations: int = 0
    saved: int = 0
    """Bytes that it keeps for the backward pass; what several units keep counts with the first."""
    received: int = 0
    """Bytes that a stage which begins with it receives."""


def measure_costs(model: nn.Module, units: Sequence[Unit], example: tuple[Tensor, ...]) -> tuple[UnitCost, ...]:
    """Measure the units on an example: forward passes in training mode, of which nothing stays.

    A backward pass is not run: its time is taken as twice the forward's, and what it needs is seen when it is saved.

    Raises:
        RequestError: the pass in training does not call the units that were found.
    """
    paths = {unit.path for unit in units}
    # The pass that warms up is the one that looks at what is saved: looking takes time.
    saving = Tracer(model, paths=paths, first=True, saved=True)
    timing = Tracer(model, paths=paths, first=True, clock=_now)
    with preserved_state(model, training=True), torch.enable_grad():
        saving.run(*arguments_of(model, example))
        seen = _read_units(saving.record, units)
        timed = []
        for _ in range(NUM_TIMED):
            timing.run(*arguments_of(model, example))
            timed.append([unit.seconds for unit in _read_units(timing.record, units)])
    return _costs(
        model, units, seen, [FORWARDS_PER_STEP * statistics.median(times) for times in zip(*timed, strict=True)]
    )


def estimate_work(model: nn.Module, units: Sequence[Unit], example: tuple[Tensor, ...]) -> tuple[UnitCost, ...]:
    """Count the work of the units in one forward pass on an example, of which nothing stays.

    Raises:
        RequestError: the pass in training does not call the units that were found, or torch cannot show what it runs.
    """
    tracer = Tracer(model, level=Level.OPERATIONS, paths={unit.path for unit in units}, first=True, saved=True)
    try:
        with preserved_state(model, training=True), torch.enable_grad():
            tracer.run(*arguments_of(model, example))
    except RuntimeError as error:
        # What torch compiles for itself cannot be watched, flex_attention for one. The pass alone was seen to run.
        raise RequestError(
            f"the work of the module cannot be counted: {str(error).splitlines()[0]}; name the places in pipeline.stages, or set "
            'pipeline.balance = "measured"'
        ) from error
    seen = _read_units(tracer.record, units)
    return _costs(model, units, seen, [FORWARDS_PER_STEP * unit.operations / OPERATIONS_PER_SECOND for unit in seen])


def _now(values: Any) -> float:
    devices = (leaf.device for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
    device = next((device for device in devices if device.type != "cpu"), None)
    if device is not None:
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def _read_units(record: Record, units: Sequence[Unit]) -> list[_UnitUse]:
    """What the units did in a pass.

    Raises:
        RequestError: the pass does not call the units that were found.
    """
    # What runs before the first unit counts with it.
    seen = [_UnitUse("")]
    num_called, depth = 0, 0
    times = [record.start]
    counted = {tensor.storage for tensor in (*record.parameters.values(), *record.buffers.values())}
    for event in record.events:
        if isinstance(event, ModuleCall):
            depth += 1
            # What a unit calls is its own affair.
            if depth == 1:
                _begin(seen, times, event, is_first=num_called == 0)
                num_called += 1
        elif isinstance(event, ModuleReturn):
            depth -= 1
        elif isinstance(event, Call):
            seen[-1].operations += _operations(event)
        elif isinstance(event, Saved) and event.tensor.storage not in counted:
            counted.add(event.tensor.storage)
            seen[-1].saved += event.tensor.storage_bytes
    seen = seen[:num_called]
    _check_order([unit.path for unit in seen], [unit.path for unit in units])
    for unit, (before, after) in zip(seen, pairwise([*times, record.end]), strict=False):
        unit.seconds = after - before
    return seen


def _begin(seen: list[_UnitUse], times: list[float], call: ModuleCall, *, is_first: bool) -> None:
    if is_first:
        seen[0].path = call.path
        return
    # What has a gradient comes from units before; the model's inputs and masks made of them are at hand everywhere.
    tensors = tensors_in((call.args, call.kwargs))
    received = sum(tensor.nbytes for tensor in tensors if tensor.requires_grad)
    seen.append(_UnitUse(call.path, received=received))
    times.append(call.time)


def _operations(call: Call) -> int:
    if call.products:
        return sum(product.operations for product in call.products)
    # All of an embedding's table, too: its gradient is as large as the table, however few rows are read.
    num_bytes = sum(tensor.nbytes for tensor in tensors_in((call.args, call.kwargs, call.output)))
    return 0 if is_view(call.func) else OPERATIONS_PER_BYTE * num_bytes


def _check_order(called: Sequence[str], expected: Sequence[str]) -> None:
    for place, path in enumerate(called):
        wanted = expected[place] if place < len(expected) else "nothing more"
        if path != wanted:
            raise RequestError(_other_way(f"calls {path!r}", wanted))
    if len(called) < len(expected):
        raise RequestError(_other_way("ends", expected[len(called)]))


def _other_way(what: str, expected: str) -> str:
    return (
        f"the forward pass in training {what} where it called {expected!r} on the example; "
        "a module that is cut must take the same way for every batch"
    )


def _costs(
    model: nn.Module, units: Sequence[Unit], seen: Sequence[_UnitUse], seconds: Sequence[float]
) -> tuple[UnitCost, ...]:
    weights = _weight_bytes(model, units)
    return tuple(
        UnitCost(
            path=unit.path,
            seconds=seconds[call],
            weight_bytes=weights[call],
            activation_bytes=seen[call].saved,
            can_start=unit.is_once,
            boundary_bytes=seen[call].received,
        )
        for call, unit in enumerate(units)
    )


def _weight_bytes(model: nn.Module, units: Sequence[Unit]) -> list[int]:
    """Weights that several units have count once, with the first; weights of no unit count with the first of all."""
    seen: set[Tensor] = set()
    sizes = []
    for unit in units:
        own = set(model.get_submodule(unit.path).parameters()) - seen
        seen |= own
        sizes.append(sum(parameter.nbytes for parameter in own))
    rest = sum(parameter.nbytes for parameter in model.parameters() if parameter not in seen)
    return [sizes[0] + rest, *sizes[1:]] if sizes else []
