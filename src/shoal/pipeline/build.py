"""One rank's part in a pipeline: the model cut where the plan wants it, and the ways to the other stages.

A rehearsal has no peers: what would come from other stages then has the right shapes and some finite values.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.comm.mesh import Mesh
from shoal.comm.world import World
from shoal.core.axes import Axis
from shoal.core.errors import RequestError
from shoal.costs.tracer import preserved_state
from shoal.parallel.analysis.structure import ModuleAnalysis
from shoal.pipeline.config import PipelineConfig
from shoal.pipeline.cut import IllegalCut, StagedModule
from shoal.pipeline.p2p import Endpoint, Message, MessageMeta, PointToPoint, TensorMeta
from shoal.pipeline.share import SharedGradients, places_of
from shoal.pipeline.stages import Agree, choose_starts, name_legal
from shoal.pipeline.stand_in import keep_part
from shoal.pipeline.units import Unit, find_units
from shoal.randomness.dropout import DropoutKey
from shoal.schedules.schedule import Schedule

_SIZE = 1e-2
"""Of the values that are made up: activations and gradients of about this size keep every number finite."""


def learn_metas(chain: StagedModule, inputs: Sequence[Tensor]) -> dict[int, MessageMeta]:
    """What a microbatch sends under each tag, from one pass through all stages of a model that has kept them all."""
    found: dict[int, MessageMeta] = {}
    # Not in training: shapes are the same, and dropout wants to be told whose samples these are.
    with preserved_state(chain.model, training=False), torch.enable_grad():
        received: Sequence[Tensor] = ()
        for stage in range(chain.num_stages - 1):
            outputs = chain.run(stage, inputs, received)
            meta = tuple(TensorMeta(tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for tensor in outputs)
            # Endpoints as the runtime numbers them: two for each stage, outputs and gradients.
            found[2 * stage] = meta
            found[2 * (stage + 1) + 1] = tuple(
                TensorMeta(part.shape, part.dtype, False) for part in meta if part.has_gradient
            )
            received = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in outputs]
    return found


class RehearsedPointToPoint(PointToPoint):
    """Sends into the void, which is counted, and receives what was made up."""

    def __init__(self, p2p: PointToPoint, learnt: Mapping[int, MessageMeta]) -> None:
        # All that the real one has, a traffic counter and a device among it; nothing is ever sent through its group.
        self.__dict__.update(p2p.__dict__)
        self._learnt = learnt
        self._made: dict[TensorMeta, Tensor] = {}

    def expect(self, endpoint: Endpoint, kind: Hashable) -> Message:
        """See ``PointToPoint``."""
        return _MadeUpMessage(self, endpoint, kind)

    def made_up(self, endpoint: Endpoint, kind: Hashable) -> tuple[list[Tensor], MessageMeta]:
        """A message of a endpoint."""
        meta = self.metas[endpoint, kind] if (endpoint, kind) in self.metas else self._learnt[endpoint.tag]
        return [self._value(part).clone() for part in meta], meta

    def _value(self, part: TensorMeta) -> Tensor:
        if part not in self._made:
            made = torch.zeros(part.shape, dtype=part.dtype, device=self.device)
            if made.is_floating_point():
                made.uniform_(-_SIZE, _SIZE, generator=torch.Generator(self.device).manual_seed(1))
            self._made[part] = made
        return self._made[part]

    def _post(self, tensor: Tensor, endpoint: Endpoint, needed_at: int) -> None:
        """Nobody is there."""


class _MadeUpMessage(Message):
    """A message that is here already."""

    def __init__(self, p2p: RehearsedPointToPoint, endpoint: Endpoint, kind: Hashable) -> None:
        self._source, self._endpoint, self._kind = p2p, endpoint, kind

    def open(self) -> tuple[list[Tensor], MessageMeta]:
        """See ``Message``."""
        return self._source.made_up(self._endpoint, self._kind)


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Where a model is cut, and what runs over its stages; the same on every rank."""

    units: tuple[Unit, ...]
    starts: tuple[int, ...]
    schedule: Schedule

    def elsewhere(self, rank: int) -> tuple[str, ...]:
        """The units that no stage of a rank calls, in the order of calls."""
        own = self.schedule.grid.stages_of(rank)
        called = {
            unit.path for call, unit in enumerate(self.units) if sum(call >= start for start in self.starts) - 1 in own
        }
        return tuple(dict.fromkeys(unit.path for unit in self.units if unit.path not in called))

    def describe(self) -> list[str]:
        """A line per stage, for people."""
        grid, ends = self.schedule.grid, [*self.starts[1:], len(self.units)]
        lines = []
        for stage, (first, end) in enumerate(zip(self.starts, ends, strict=True)):
            paths = [unit.path for unit in self.units[first:end]]
            span = paths[0] if len(paths) == 1 else f"{paths[0]} to {paths[-1]}"
            ranks = sorted({rank for _, _, rank in places_of(grid, frozenset({stage}))})
            lines.append(f"pp: stage {stage} on pipeline rank{'s' if len(ranks) > 1 else ''} {_listed(ranks)}: {span}")
        return lines


def _listed(numbers: Sequence[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}" if most else last


def find_stages(
    model: nn.Module,
    example: tuple[Tensor, ...],
    analysis: ModuleAnalysis,
    *,
    schedule: Schedule,
    config: PipelineConfig,
    agree: Agree = tuple,
    samples: int | None = None,
) -> Stages:
    """Cut a plain model, as one process builds it, for a schedule; ``agree`` and ``samples`` are those of ``choose_starts``.

    Raises:
        RequestError: it has fewer places to be cut at than the schedule has stages; names them. Or several ranks would take the
            running statistics of one stage.
    """
    if schedule.grid.has_copies:
        _refuse_statistics(model, schedule)
    units = find_units(model, example, analysis)
    if not units:
        raise RequestError(
            f"{type(model).__name__} calls no module of its own, so pp={schedule.grid.num_ranks} finds no place to cut it; put "
            "its parts into modules, or leave pp out"
        )
    starts = choose_starts(model, units, example, schedule=schedule, config=config, agree=agree, samples=samples)
    return Stages(units=units, starts=starts, schedule=schedule)


def _refuse_statistics(model: nn.Module, schedule: Schedule) -> None:
    """A plan is refused before; this is for schedules in files, of which a plan does not know where stages lie."""
    for path, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.track_running_stats:
            raise RequestError(
                f"schedule {schedule.name} has several ranks for a stage, and the batch norm of {path!r} would take its running "
                f"statistics on each over some of the microbatches; use a schedule with one rank for every stage"
            )


def prove_stages(model: nn.Module, example: tuple[Tensor, ...], stages: Stages) -> dict[str, tuple[int, ...]]:
    """Cut a model as ``build_pipeline`` will, in one process; the ranks that will keep each tensor of its ``state_dict``.

    Args:
        model: as one process builds it; of no use afterwards.
        example: inputs.
        stages: where to cut.

    Raises:
        RequestError: as ``build_pipeline`` would on every rank.
    """
    _, _, owners = _cut(model, example, stages, None)
    return owners


@dataclass(frozen=True, kw_only=True)
class RankPart:
    """What a rank keeps of a model, by names only: enough to cut another copy of the model as that rank's own."""

    elsewhere: tuple[str, ...]
    """Paths of the units that its stages do not call."""
    names: frozenset[str]
    """Of its parameters; one of the names of a tied one is enough."""

    def cut(self, model: nn.Module) -> None:
        """Leave of a whole model, in place, what the rank has: its modules, in whose order ZeRO lays weights out, included."""
        named = model.named_parameters(remove_duplicate=False)
        keep_part(model, elsewhere=self.elsewhere, kept=[value for name, value in named if name in self.names])


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A model of which this rank has kept its stages."""

    stages: Stages
    chain: StagedModule
    p2p: PointToPoint
    shared: SharedGradients
    rank: int
    """Along ``pp``."""
    own: Mapping[str, nn.Parameter]
    """This rank's parameters, by their names in the whole model."""
    holders: Mapping[str, frozenset[int]]
    """The stages that hold each parameter of the whole model."""
    owners: Mapping[str, tuple[int, ...]]
    """The ranks that keep each tensor of the whole model's ``state_dict``, lowest first."""

    @property
    def schedule(self) -> Schedule:
        """What runs."""
        return self.stages.schedule

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """Those of ``own`` that are trained, in the order of names."""
        return {name: parameter for name, parameter in sorted(self.own.items()) if parameter.requires_grad}

    @property
    def part(self) -> RankPart:
        """What this rank kept."""
        return RankPart(elsewhere=self.stages.elsewhere(self.rank), names=frozenset(self.own))

    def is_first_owner(self, name: str) -> bool:
        """True on one of the ranks that keep a tensor."""
        return self.owners[name][0] == self.rank


def build_pipeline(
    model: nn.Module,
    example: tuple[Tensor, ...],
    stages: Stages,
    *,
    mesh: Mesh,
    world: World,
    dropout: DropoutKey,
    rehearsed: Sequence[Tensor] = (),
) -> Pipeline:
    """Cut a model in place and let go of what belongs to other ranks.

    Args:
        model: with every technique that changes its units.
        example: inputs, as a step will give them.
        stages: where to cut.
        mesh: the ranks.
        world: where tensors arrive, and how long to wait for a neighbour.
        dropout: of the model.
        rehearsed: inputs of the microbatches to come, where the world has no other processes: what they would send is like
            what this one sees of all stages before it lets go of the others.

    Raises:
        RequestError: the model cannot be cut there; or weights are tied across stages that are not updated together.
    """
    chain, holders, owners = _cut(model, example, stages, dropout)
    grid, rank = stages.schedule.grid, mesh.coordinate(Axis.PIPELINE)
    metas = learn_metas(chain, rehearsed) if world.is_rehearsed else {}
    own = chain.keep(grid.stages_of(rank))
    group = mesh.group(Axis.PIPELINE.value)
    assert group is not None, "a pipeline has at least two ranks"
    p2p = PointToPoint(group, traffic=mesh.traffic, device=world.device, deadline_seconds=world.deadline_seconds)
    if world.is_rehearsed:
        p2p = RehearsedPointToPoint(p2p, metas)
    trained = {name: parameter for name, parameter in own.items() if parameter.requires_grad}
    shared = SharedGradients(trained, holders, grid=grid, rank=rank, p2p=p2p)
    return Pipeline(
        stages=stages, chain=chain, p2p=p2p, shared=shared, rank=rank, own=own, holders=holders, owners=owners
    )


def _cut(
    model: nn.Module, example: tuple[Tensor, ...], stages: Stages, dropout: DropoutKey | None
) -> tuple[StagedModule, dict[str, frozenset[int]], dict[str, tuple[int, ...]]]:
    """The chain, the stages that hold each parameter, and the ranks that keep each saved tensor."""
    chain = cut_chain(model, example, stages, dropout=dropout)
    holders = chain.holders()
    if stages.schedule.updates.are_asynchronous:
        _refuse_tied(holders, stages.schedule.name)
    return chain, holders, _find_owners(model, chain, holders, stages.schedule)


def cut_chain(
    model: nn.Module, example: tuple[Tensor, ...], stages: Stages, *, dropout: DropoutKey | None = None
) -> StagedModule:
    """The chain of a model that is cut in place.

    Raises:
        RequestError: it cannot be cut there; names the places where it can.
    """
    chain = StagedModule(model, stages.units, stages.starts, dropout=dropout)
    try:
        chain.settle(example)
    except IllegalCut as error:
        chain.undo()
        raise RequestError(f"{error}. {name_legal(model, stages.units, example)}") from error
    return chain


def _refuse_tied(holders: Mapping[str, frozenset[int]], schedule: str) -> None:
    for name, stages in holders.items():
        if len(stages) > 1:
            where = " and ".join(map(str, sorted(stages)))
            raise RequestError(
                f"schedule={schedule} updates each stage by itself, and {name!r} is held by stages {where}, which would drift "
                "apart; untie it, cut the model so that both uses are in one stage, or use schedule=1f1b"
            )


def _find_owners(
    model: nn.Module, chain: StagedModule, holders: Mapping[str, frozenset[int]], schedule: Schedule
) -> dict[str, tuple[int, ...]]:
    """By name in ``state_dict``: what is in no unit is on every rank."""
    grid = schedule.grid
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    paths = dict.fromkeys(unit.path for unit in chain.units)
    found = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in names:
            stages = holders[names[id(tensor)]]
        else:
            inside = [path for path in paths if name.startswith(f"{path}.")]
            stages = frozenset(stage for path in inside for stage in chain.stages_of(path))
        ranks = {rank for *_, rank in places_of(grid, stages)} or set(range(grid.num_ranks))
        found[name] = tuple(sorted(ranks))
    return found
