"""Hooks: code of others that is called at fixed points of training, on every rank.

    class Norms(Hook):
        def on_gradients(self, step, parameters, loss_scale):
            print(step, {name: float(one.grad.norm()) for name, one in parameters.items()})

    Trainer(model, data, ..., hooks=[Norms()])

Steps are counted from 0 here, as in the engine. A hook may look at what it is given, and ``on_gradients`` may change gradients,
which every rank must then do alike. Nothing that a hook raises is caught: it ends this rank with the hook's own traceback, and
with it the run, because a rank that goes away ends its peers.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from shoal.core.errors import RequestError
from shoal.data.loader import StepBatch
from shoal.engine.evaluate import Evaluation
from shoal.schedules.schedule import Action


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step found out; the same on every rank."""

    loss: float
    grad_norm: float
    is_finite: bool
    """Loss and gradient are finite."""
    is_taken: bool
    """The update was applied: they are finite, and the loss is not above its limit."""


class Hook:
    """Does nothing at any point; a hook overrides the methods of the points that it is there for."""

    def on_step_start(self, step: int, batch: StepBatch) -> None:
        """A step begins on this replica's part of its batch. An asynchronous pipeline begins several at once, in their order."""

    def on_microbatch(self, step: int, index: int, loss: Tensor | None) -> None:
        """A microbatch's passes have run on this rank; ``loss`` is its share of the step's, None where another rank computes it.

        A pipeline has several under way at once and tells of them when all have run.
        """

    def on_action(self, action: Action, begin: float, waited: float, end: float) -> None:
        """A pipeline has done one cell of its schedule; the times are by ``perf_counter``."""

    def on_gradients(self, step: int, parameters: Mapping[str, nn.Parameter], loss_scale: float) -> None:
        """Gradients are summed over ranks, not yet clipped, and still multiplied by the loss scale.

        ``parameters`` are those that this rank updates: whole ones, or the rows that are its own.
        """

    def on_update(self, step: int, result: StepResult) -> None:
        """A step is over: weights are updated, or, where ``result.is_taken`` is false, left as they were."""

    def on_evaluation(self, step: int, found: Evaluation) -> None:
        """A pass over a held-out split is done; ``step`` is how many steps were taken before it."""

    def on_save(self, step: int) -> None:
        """The state after so many steps is copied, and the writing of its checkpoint begins."""

    def on_end(self, step: int, status: str) -> None:
        """Training is over in an orderly way: ``completed`` or ``interrupted``, after so many steps."""


def check_hooks(hooks: Iterable[Hook]) -> tuple[Hook, ...]:
    """The hooks, each of which is one.

    Raises:
        RequestError: something else is among them; says which, and what to give instead.
    """
    if isinstance(hooks, Hook):
        raise RequestError(f"hooks= is one {type(hooks).__name__}; give a list of hooks: [...]")
    found = tuple(hooks)
    for place, hook in enumerate(found):
        given: object = hook
        if isinstance(given, Hook):
            continue
        if isinstance(given, type) and issubclass(given, Hook):
            raise RequestError(
                f"hooks[{place}] is the class {given.__name__} itself; give one of it: {given.__name__}()"
            )
        raise RequestError(
            f"hooks[{place}] is {given!r}, which is no hook; derive the class {type(given).__name__} from shoal.Hook, or give an "
            f"object of a class that is, with methods such as on_update(step, result)"
        )
    return found


class Hooks:
    """Some hooks, each of which is called in the order in which it was added."""

    def __init__(self, hooks: Iterable[Hook] = ()) -> None:
        self._hooks = list(check_hooks(hooks))

    def __iter__(self) -> Iterator[Hook]:
        return iter(self._hooks)

    def add(self, hook: Hook) -> None:
        """Call a hook from now on."""
        self._hooks += check_hooks([hook])

    @property
    def times_actions(self) -> bool:
        """True where a hook wants to be told of every cell of a schedule, which has to be timed for it."""
        return any(type(hook).on_action is not Hook.on_action for hook in self._hooks)

    def on_action(self, action: Action, begin: float, waited: float, end: float) -> None:
        """Tell them of a cell, as the pipeline's runtime does."""
        for hook in self._hooks:
            hook.on_action(action, begin, waited, end)
