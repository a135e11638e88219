"""The chain of calls at which any module can be cut into stages, found by watching one forward pass.

A forward pass is code, and code cannot be entered in the middle. What can be done is to run all of it and to leave out what
belongs to other stages (``cut.py``): so a stage begins and ends where a module is called. Those calls are the units. A block of
a stack is a unit; a module that has a stack inside, or is a plain sequence, is opened; every other module that an opened one
calls is a unit as it stands.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoal.core.errors import RequestError
from shoal.costs.blocks import opened_modules
from shoal.costs.tracer import ModuleCall, Record, Tracer, preserved_state
from shoal.data.batchform import arguments_of
from shoal.parallel.analysis.structure import ModuleAnalysis


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One call of the chain."""

    path: str
    is_once: bool
    """The module is called once per forward pass; only there can a stage begin."""


def find_units(model: nn.Module, example: tuple[Tensor, ...], analysis: ModuleAnalysis) -> tuple[Unit, ...]:
    """The calls of one forward pass at which it can be cut, in order.

    Raises:
        RequestError: the model does not take a sample of its data; names the module that did not.
    """
    opened = opened_modules(model, [block for stack in analysis.stacks for block in stack.blocks])
    tracer = Tracer(model)
    try:
        with preserved_state(model, training=False), torch.no_grad():
            tracer.run(*arguments_of(model, example))
    except Exception as error:  # The user's code may raise anything.
        called = list(_called(tracer.record, opened))
        raise RequestError(_describe_failure(model, tracer.record.running, called, error)) from error
    called = list(_called(tracer.record, opened))
    return tuple(Unit(path=path, is_once=called.count(path) == 1) for path in called)


def _called(record: Record, opened: set[str]) -> Iterator[str]:
    """The modules that opened ones call."""
    running = [""]
    for event in record.events:
        if isinstance(event, ModuleCall):
            if running[-1] in opened and event.path not in opened:
                yield event.path
            running.append(event.path)
        else:
            running.pop()


def _describe_failure(model: nn.Module, running: list[str], called: list[str], error: Exception) -> str:
    where = running[-1]
    module = (
        f"{where!r} ({type(model.get_submodule(where)).__name__})"
        if where
        else f"its own {type(model).__name__}.forward"
    )
    before = f" The output of {called[-2]!r} goes to {called[-1]!r}." if len(called) > 1 and where else ""
    return (
        f"the model does not take a sample of its data: {module} raised {type(error).__name__}: {error}.{before} "
        "Mend the module or the data until model(sample) works on one process"
    )
