"""Hooks: code of others that is called at fixed points of training, on every rank.

    class Norms(Hook):
        def on_gradients(self, step, parameters, loss_scale):
            print(step, {name: float(one.grad.norm()) for name, one in parameters.items()})

    Trainer(model, data, ..., hooks=[Norms()])

Steps are counted from 0 here, as in the engine. A hook may look at what it is given, and ``on_gradients`` may change gradients,
which every rank must then do alike. Nothing that a hook raises is caught: it ends this rank with the hook's own traceback, and
with it the run, because a rank that goes away ends its peers.

A hook that acts (``engine/callbacks/`` ships some) is given the model when it is attached, and asks the loop around the steps by
``model.requests``: to stop, to save, to keep a checkpoint, to tell the user something. Every rank must ask for the same at the
same step, which it does when it decides from reduced values: the losses, norms and metrics that hooks are given are such. What a
hook remembers it returns from ``state`` (JSON values, alike on all ranks) and ``tensors`` (this rank's part, with its placement);
checkpoints keep both, and a resumed run gives them back.
"""

from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from shoal.comm.mesh import Mesh
from shoal.core.errors import RequestError
from shoal.core.placement import Placement
from shoal.core.plan import Plan
from shoal.data.loading.loader import StepBatch
from shoal.engine.compression.saved import PREFIX as COMPRESSION
from shoal.engine.evaluate import Evaluation
from shoal.engine.state import Outline, RankState
from shoal.engine.stop import StopRequest
from shoal.parallel.apply import ModelLayout
from shoal.parallel.data import Reduction
from shoal.parallel.gradnorm import WholeNorms
from shoal.schedules.schedule import Action

CALLBACKS = "callbacks/"
"""Prefix of the names of what hooks keep in a checkpoint: ``callbacks/<hook>/<its own name>``."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step found out; the same on every rank."""

    loss: float
    """Of the global batch, before the update."""
    grad_norm: float
    """Of the whole gradient over all ranks, before it was clipped."""
    is_finite: bool
    """Loss and gradient are finite."""
    is_taken: bool
    """The update was applied: they are finite, and the loss is not above its limit."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the user's own step gave beside the loss, over the global batch."""


class LoopRequests:
    """What hooks ask of the loop that takes the steps. All ranks must ask for the same, at the same step."""

    def __init__(self, stop: StopRequest) -> None:
        self._stop = stop
        self._wants_save = False
        self._kept: dict[str, frozenset[int]] = {}
        self._messages: list[str] = []

    def stop(self, reason: str) -> None:
        """End training in an orderly way before the next step: the run then counts as completed."""
        self._stop.decide(reason)

    def save(self) -> None:
        """Save a checkpoint of this step, where there is a run directory to save to."""
        self._wants_save = True

    def keep(self, owner: str, steps: Iterable[int]) -> None:
        """Let the checkpoints of these steps not expire, in place of those that ``owner`` asked for before."""
        self._kept[owner] = frozenset(steps)

    def tell(self, message: str) -> None:
        """Show the user a line, once for all ranks."""
        self._messages.append(message)

    @property
    def kept(self) -> frozenset[int]:
        """Steps whose checkpoints are not to expire."""
        return frozenset().union(*self._kept.values())

    def take_save(self) -> bool:
        """True when a save was asked for since the last call; for the loop."""
        wanted, self._wants_save = self._wants_save, False
        return wanted

    def take_messages(self) -> list[str]:
        """What the user is to be told; for the loop."""
        told, self._messages = self._messages, []
        return told


class HookedModel(Protocol):
    """What a hook may use of the ``ParallelModel`` that it is attached to. All ranks call ``whole_weights`` together."""

    @property
    def plan(self) -> Plan:
        """Resolved."""

    @property
    def model(self) -> nn.Module:
        """The user's module as it is laid out on this rank."""

    @property
    def mesh(self) -> Mesh:
        """Where this rank stands among the others."""

    @property
    def layout(self) -> ModelLayout:
        """Which parameters tensor parallelism has cut, and whose gradients are partial."""

    @property
    def norms(self) -> WholeNorms | None:
        """How the parts of tensors make whole norms; None where every rank holds them whole."""

    @property
    def outline(self) -> Outline:
        """Every saved tensor of the whole model by name."""

    @property
    def reduction(self) -> Reduction:
        """What this rank updates, where that lies in the whole, and how forward passes get to read it (``publish``)."""

    @property
    def requests(self) -> LoopRequests:
        """What the loop is asked for."""

    def whole_weights(self, other: Mapping[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        """The weights of the whole model in the order of their names; ``other`` replaces some of this rank's, by name."""


class Hook:
    """Does nothing at any point; a hook overrides the methods of the points that it is there for."""

    name: ClassVar[str] = ""
    """By which checkpoints know its state; the name of its class where this is empty."""
    needs_every_step: ClassVar[bool] = False
    """An asynchronous pipeline comes to rest after every step, so that ``on_update`` sees the weights of that step."""

    def on_attach(self, model: HookedModel) -> None:
        """The model is laid out on this rank, with its first weights; a checkpoint may be loaded after this."""

    def state(self) -> Mapping[str, Any]:
        """What a checkpoint keeps of this hook as JSON values; the same on every rank."""
        return {}

    def tensors(self) -> Mapping[str, tuple[Tensor, Placement]]:
        """What a checkpoint keeps as tensors: live ones, by name, with where this rank's part lies in the whole."""
        return {}

    def load_state(self, values: Mapping[str, Any] | None) -> None:
        """A checkpoint was loaded, and ``tensors`` were written; None where it knows nothing of this hook, nor its tensors."""

    def variants(self) -> Mapping[str, AbstractContextManager[None]]:
        """Other weights that evaluations look at too: inside the context they are the model's.

        What is found becomes metrics whose names begin with the key and ``_``, such as ``ema_loss``.
        """
        return {}

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


def without_missing(state: RankState, saved_names: Container[str]) -> RankState:
    """A rank's state without what a checkpoint need not have: tensors of hooks and residuals that it was saved without."""
    optional = (CALLBACKS, COMPRESSION)
    missing = {name for name in state.tensors if name.startswith(optional) and name not in saved_names}
    if not missing:
        return state
    return replace(
        state,
        tensors={name: tensor for name, tensor in state.tensors.items() if name not in missing},
        placements={name: placement for name, placement in state.placements.items() if name not in missing},
    )


class Hooks:
    """Some hooks, each of which is called in the order in which it was added."""

    def __init__(self, hooks: Iterable[Hook] = ()) -> None:
        self._hooks = list(check_hooks(hooks))

    def __iter__(self) -> Iterator[Hook]:
        return iter(self._hooks)

    def add(self, hook: Hook) -> None:
        """Call a hook from now on."""
        self._hooks += check_hooks([hook])

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Inside, none of them is called: for steps that are taken back."""
        hooks, self._hooks = self._hooks, []
        try:
            yield
        finally:
            self._hooks = hooks

    def named(self) -> dict[str, Hook]:
        """The hooks by the names that checkpoints know them by; a second one of a name is ``name-2``."""
        found: dict[str, Hook] = {}
        for hook in self._hooks:
            name, number = hook.name or type(hook).__name__, 1
            while (key := name if number == 1 else f"{name}-{number}") in found:
                number += 1
            found[key] = hook
        return found

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of them as JSON values, by name."""
        return {name: dict(state) for name, hook in self.named().items() if (state := hook.state())}

    def load_state(self, values: Mapping[str, Any]) -> None:
        """Give back what ``state`` returned when the checkpoint was saved."""
        for name, hook in self.named().items():
            hook.load_state(values.get(name))

    def add_tensors(self, state: RankState) -> RankState:
        """This rank's state with the tensors of its hooks."""
        own = {
            f"{CALLBACKS}{name}/{key}": placed
            for name, hook in self.named().items()
            for key, placed in hook.tensors().items()
        }
        if not own:
            return state
        return replace(
            state,
            tensors={**state.tensors, **{name: tensor for name, (tensor, _) in own.items()}},
            placements={**state.placements, **{name: placement for name, (_, placement) in own.items()}},
        )

    @property
    def follow_evaluations(self) -> bool:
        """True where a hook may decide something from an evaluation, which must then happen before the step's checkpoint."""
        return any(type(hook).on_evaluation is not Hook.on_evaluation and bool(hook.state()) for hook in self._hooks)

    @property
    def need_every_step(self) -> bool:
        """True where a hook must see the weights of every step."""
        return any(hook.needs_every_step for hook in self._hooks)

    @property
    def times_actions(self) -> bool:
        """True where a hook wants to be told of every cell of a schedule, which has to be timed for it."""
        return any(type(hook).on_action is not Hook.on_action for hook in self._hooks)

    def on_action(self, action: Action, begin: float, waited: float, end: float) -> None:
        """Tell them of a cell, as the pipeline's runtime does."""
        for hook in self._hooks:
            hook.on_action(action, begin, waited, end)
