"""ZeRO 1, 2 and 3 over the ``dp`` axis: optimizer state, then gradients, then weights are sharded (arXiv:1910.02054).

    stage   weights               gradients                    optimizer state
    1       whole                 whole                        shard
    2       whole                 shard, and units in flight   shard
    3       shard, units in use   shard, and units in flight   shard

Under accumulation stages 2 and 3 keep whole gradients as stage 1 does, and reduce once per step, at the last microbatch: a
reduction per microbatch would cost its traffic again, and would sum in another order than one process.

Why not torch's ``fully_shard``: it pads and copies every parameter by itself, it cuts where the fused optimizer kernels round
differently (``optim.flat.CUT_MULTIPLE``), which loses the bits of one process, and it moves data by gloo's reduce-scatter and
all-gather. On a workload bound by communication it takes 3.4 times DDP's step at stage 3, and this module 0.78
(``benchmarks/zero``).

    layout.py      where every element lies (plain numbers)       weights.py    gather and let go, stage 3
    pool.py        which buffer a gathered unit takes             gradients.py  catch, sum and scatter
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shoal.comm.mesh import Mesh
from shoal.comm.trafficcounter import Traffic, TrafficCounts, add_traffic
from shoal.compression.config import CompressionConfig
from shoal.core.axes import Axis
from shoal.core.errors import RequestError
from shoal.core.placement import Placement, place_whole
from shoal.parallel.analysis.structure import ModuleAnalysis
from shoal.parallel.compressed import CompressedGradients, Compressing
from shoal.parallel.zero.gradients import GradientStore, pieces_of
from shoal.parallel.zero.layout import Pool, ZeroLayout, backward_visits, lay_out, next_visit, owned_elements
from shoal.parallel.zero.quantized import WeightCodec
from shoal.parallel.zero.weights import WeightStore


def apply_zero(
    model: nn.Module,
    *,
    analysis: ModuleAnalysis,
    mesh: Mesh,
    stage: int,
    num_microbatches: int,
    placements: Mapping[str, Placement],
    compressing: Compressing | None = None,
    gathering: CompressionConfig | None = None,
) -> "ZeroReduction":
    """Shard a model's training state along ``dp``, in place. The model must be in its final place, type and shape.

    Args:
        model: its trainable parameters become views of flat buffers; at stage 3 they are empty outside the modules that use them.
        analysis: names the blocks, which are the units of gathering and reducing.
        mesh: the ranks.
        stage: 1, 2 or 3.
        num_microbatches: microbatches of one step; more than one needs whole gradients at every stage.
        placements: where parameters that tensor parallelism has cut lie in their wholes; the others are whole.
        compressing: how gradients are compressed; None where they are not. They are then kept whole at every stage: a residual
            is whole too, and selections and factors are of whole tensors.
        gathering: how weights are compressed when they are gathered; None where they are not.

    Raises:
        RequestError: the parameters are of several types or on several devices, and one buffer cannot hold them.
    """
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    _refuse_mixtures(parameters)
    layout = lay_out(model, analysis, mesh.degree(Axis.DATA))
    flat = _move_weights(layout, parameters, rank=mesh.coordinate(Axis.DATA), keeps_whole=stage < 3)
    reduction = ZeroReduction(
        layout,
        parameters,
        mesh=mesh,
        stage=stage,
        weights=flat,
        placements=placements,
        num_microbatches=num_microbatches,
        compressing=compressing,
        gathering=gathering,
    )
    if reduction.store is not None:
        reduction.store.attach(model)
    return reduction


class ZeroReduction:
    """How a sharded step reduces gradients and brings weights back; see ``Reduction``."""

    def __init__(
        self,
        layout: ZeroLayout,
        parameters: Mapping[str, nn.Parameter],
        *,
        mesh: Mesh,
        stage: int,
        weights: Tensor,
        placements: Mapping[str, Placement],
        num_microbatches: int,
        compressing: Compressing | None = None,
        gathering: CompressionConfig | None = None,
    ) -> None:
        self.layout = layout
        self.mesh = mesh
        self.stage = stage
        self.weights = weights
        """Stages 1 and 2: all weights. Stage 3: this rank's shards."""
        self.rank = mesh.coordinate(Axis.DATA)
        self.codec = None if gathering is None else WeightCodec(layout, gathering)
        self.masters = weights
        """What the optimizer updates: its rows of ``weights``, or, where those come by a codec, its own shards of them."""
        if self.codec is not None and stage < 3:
            self.masters = _copy_shards(layout, weights, self.rank)
        self.store = WeightStore(layout, parameters, mesh=mesh, shard=weights, codec=self.codec) if stage == 3 else None
        self.exchange: CompressedGradients | None = None
        if compressing is not None:
            shapes = {slot.name: slot.shape for unit in layout.units for slot in unit.slots}
            self.exchange = compressing.build(shapes, mesh.channel(Axis.DATA), owned_elements(layout))
        self.gradients = GradientStore(
            layout,
            parameters,
            mesh=mesh,
            keeps_whole=stage == 1 or num_microbatches > 1 or compressing is not None,
            on_unit_in=lambda index: None if self.store is None else self.store.unit_is_in(index),
            exchange=self.exchange,
        )
        self.num_microbatches = num_microbatches
        self._starts = layout.shard_starts(self.rank) if stage == 3 else layout.whole_starts()
        self._master_starts = layout.shard_starts(self.rank) if self._has_shards else self._starts
        self._updated, self._grads = self._cut_pieces()
        self._placements = self._place_pieces(placements)
        if self.codec is not None:
            self.publish()

    @property
    def _has_shards(self) -> bool:
        """What is updated lies in a buffer of shards, and not among the whole weights."""
        return self.stage == 3 or self.codec is not None

    @property
    def updated(self) -> Mapping[str, nn.Parameter]:
        """This rank's rows of each parameter, by name in the order of names; parameters of which it has none are left out."""
        return self._updated

    @property
    def placements(self) -> Mapping[str, Placement]:
        """Where each of ``updated`` lies in its whole parameter."""
        return self._placements

    def begin_step(self) -> None:
        """Forget the last step's gradients."""
        self.gradients.begin_step()
        if self.store is not None:
            # What an evaluation left in the pool would make this step's traffic depend on it.
            self.store.forget()

    @contextmanager
    def microbatch(self, *, is_last: bool) -> Iterator[None]:
        """Surrounds one microbatch's forward and backward pass; sums over replicas happen in the last one only."""
        assert is_last or self.gradients.keeps_whole, "the number of microbatches was given as 1"
        self.gradients.begin_microbatch(is_last=is_last)
        try:
            yield
        finally:
            if self.store is not None:
                self.store.end_microbatch()

    @contextmanager
    def local(self) -> Iterator[None]:
        """Sums nothing and drops gradients as they come: all of them at once may not fit a rank that keeps a shard of them."""
        self.gradients.begin_microbatch(is_last=False)
        self.gradients.is_active = False
        try:
            yield
        finally:
            self.gradients.is_active = True
            if self.store is not None:
                self.store.end_microbatch()

    def finish(self) -> None:
        """Wait until ``updated`` has its gradients."""
        self.gradients.finish()
        for name, parameter in self._updated.items():
            parameter.grad = self._grads[name]

    def publish(self) -> None:
        """Bring updated weights to where forward passes read them; also after ``updated`` was written in any other way."""
        if self.store is not None:
            self.store.forget()
            return
        channel = self.mesh.channel(Axis.DATA)
        handles = []
        for index, (unit, start) in enumerate(zip(self.layout.units, self._starts, strict=True)):
            whole = self.weights[start : start + unit.size]
            if self.codec is not None:
                first = self._master_starts[index]
                self.codec.gather(index, self.masters[first : first + unit.counts[self.rank]], whole, channel)
                continue
            own = whole[unit.start(self.rank) : unit.start(self.rank) + unit.counts[self.rank]]
            handles.append(channel.start_all_gather(own, whole, unit.counts))
        for handle in handles:
            handle.wait()

    def untouched(self) -> list[str]:
        """Parameters that got no gradient on this rank in this step, in the order of names; they count as zeros."""
        return self.gradients.untouched()

    def forecast_traffic(self, num_microbatches: int) -> TrafficCounts:
        """What one step should move, from the layout and the modules that the last forward pass called."""
        calls = self.store.calls if self.store is not None and self.store.calls else None
        found = forecast_traffic(
            self.layout,
            stage=self.stage,
            num_microbatches=num_microbatches,
            itemsize=self.weights.element_size(),
            num_context_ranks=self.mesh.degree(Axis.CONTEXT),
            calls=calls,
            prefetches=self.store is not None and self.store.prefetches,
            gathered_bytes=None
            if self.codec is None
            else [sum(self.codec.counts(i)) for i in range(len(self.layout.units))],
        )
        if self.exchange is None or not self.exchange.is_compressed:
            return found
        found.pop((Axis.DATA.value, "reduce_scatter"), None)
        return add_traffic(found, self.exchange.forecast_traffic())

    def _cut_pieces(self) -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
        pieces: dict[str, Tensor] = {}
        gradients: dict[str, Tensor] = {}
        for index, unit in enumerate(self.layout.units):
            start = self._master_starts[index] + (0 if self._has_shards else unit.start(self.rank))
            pieces |= pieces_of(unit, self.masters[start : start + unit.counts[self.rank]], self.rank)
            gradients |= pieces_of(unit, self.gradients.shard(index), self.rank)
        return {name: nn.Parameter(pieces[name]) for name in sorted(pieces)}, gradients

    def _place_pieces(self, placements: Mapping[str, Placement]) -> dict[str, Placement]:
        slots = {slot.name: slot for unit in self.layout.units for slot in unit.slots}
        return {
            name: placements.get(name, place_whole(slots[name].shape)).rows(*slots[name].rows(self.rank))
            for name in self._updated
        }


def forecast_traffic(
    layout: ZeroLayout,
    *,
    stage: int,
    num_microbatches: int,
    itemsize: int,
    num_context_ranks: int = 1,
    calls: list[tuple[int, bool]] | None = None,
    gathered_bytes: Sequence[int] | None = None,
    prefetches: bool = False,
) -> TrafficCounts:
    """What one step of one rank should move, by axis and operation.

    Args:
        layout: the units.
        stage: 1, 2 or 3.
        num_microbatches: forward and backward passes of the step.
        itemsize: bytes of an element.
        num_context_ranks: ranks along ``cp``.
        calls: visits in the order of a forward pass, and whether their backward pass reads weights; each module once when
            left out.
        gathered_bytes: of each unit's weights, where they are compressed.
        prefetches: the next unit is gathered while one computes (between hosts).
    """
    sizes = [unit.size * itemsize for unit in layout.units]
    counts: TrafficCounts = {}
    if num_context_ranks > 1:
        counts[Axis.CONTEXT.value, "all_reduce"] = Traffic(calls=len(sizes), num_bytes=sum(sizes))
    if layout.num_ranks == 1:
        return counts
    counts[Axis.DATA.value, "reduce_scatter"] = Traffic(calls=len(sizes), num_bytes=sum(sizes))
    gathered = list(range(len(sizes))) if stage < 3 else _gathered_units(layout, num_microbatches, calls, prefetches)[0]
    num_bytes = sum((gathered_bytes or sizes)[index] for index in gathered)
    counts[Axis.DATA.value, "all_gather"] = Traffic(calls=len(gathered), num_bytes=num_bytes)
    return counts


def predict_pool(layout: ZeroLayout, *, prefetches: bool = False) -> list[int]:
    """Elements of each buffer that stage 3 gathers units into, when every module is called once."""
    return _gathered_units(layout, 1, None, prefetches)[1]


def _gathered_units(
    layout: ZeroLayout, num_microbatches: int, calls: list[tuple[int, bool]] | None, prefetches: bool
) -> tuple[list[int], list[int]]:
    """The units that a step gathers at stage 3, in order, and the buffers for them: the pool's own policy without memory."""
    if calls is None:
        calls = [(number, visit.reads_in_backward) for number, visit in enumerate(layout.visits)]
    pool, gathered = Pool(layout.capacities()), []
    coming: dict[int, int] = {}

    def gather(index: int) -> int:
        place, is_there = pool.take(index)
        gathered.extend([] if is_there else [index])
        return place

    def take(units: tuple[int, ...]) -> dict[int, int]:
        return {index: coming.pop(index) if index in coming else gather(index) for index in units}

    def prefetch(units: tuple[int, ...], held: Mapping[int, int]) -> None:
        if prefetches and not coming:
            coming.update({index: gather(index) for index in units if index not in held})

    backward = backward_visits(layout, calls)
    for _ in range(num_microbatches):
        root = take(() if layout.root is None else (layout.root,))
        prefetch(next_visit(layout, -1), root)
        ahead = [(layout.visits[number].units, next_visit(layout, number)) for number, _ in calls]
        ahead += zip(backward, [*backward[1:], ()][: len(backward)], strict=True)
        for units, following in ahead:
            held = take(units)
            prefetch(following, held)
            for place in held.values():
                pool.let_go(place)
        for place in (*coming.values(), *root.values()):
            pool.let_go(place)
        coming.clear()
    return gathered, pool.sizes


def _refuse_mixtures(parameters: Mapping[str, nn.Parameter]) -> None:
    if not parameters:
        raise RequestError(
            "the model has no trainable parameter, so there is nothing to shard; leave zero out of the plan"
        )
    kinds: dict[tuple[torch.dtype, torch.device], str] = {}
    for name, parameter in parameters.items():
        kinds.setdefault((parameter.dtype, parameter.device), name)
    if len(kinds) > 1:
        listed = ", ".join(f"{name!r} is {dtype} on {device}" for (dtype, device), name in kinds.items())
        raise RequestError(
            f"ZeRO keeps all weights in one buffer, and this model has {len(kinds)} kinds: {listed}; "
            "cast them to one type, or leave zero out of the plan"
        )


def _copy_shards(layout: ZeroLayout, weights: Tensor, rank: int) -> Tensor:
    """This rank's shards of all units, one after the other."""
    parts = []
    for unit, start in zip(layout.units, layout.whole_starts(), strict=True):
        first = start + unit.start(rank)
        parts.append(weights[first : first + unit.counts[rank]])
    return torch.cat(parts)


def _move_weights(
    layout: ZeroLayout, parameters: Mapping[str, nn.Parameter], *, rank: int, keeps_whole: bool
) -> Tensor:
    """The flat buffer of weights, whole or this rank's shards. A parameter's own memory is freed as soon as it is copied."""
    example = next(iter(parameters.values())).detach()
    # Not zeros: its pages are touched one parameter at a time, so that the peak is one model and not two.
    flat = example.new_empty(layout.size if keeps_whole else layout.shard_size(rank))
    starts = layout.whole_starts() if keeps_whole else layout.shard_starts(rank)
    for unit, start in zip(layout.units, starts, strict=True):
        pieces = {} if keeps_whole else pieces_of(unit, flat[start : start + unit.counts[rank]], rank)
        for slot in unit.slots:
            parameter = parameters[slot.name]
            first, end = slot.rows(rank)
            if keeps_whole:
                place = flat[start + slot.offset : start + slot.offset + slot.numel].view(slot.shape)
                place.copy_(parameter.detach())
                parameter.data = place
                continue
            if slot.name in pieces:
                pieces[slot.name].copy_(parameter.detach()[first:end] if slot.shape else parameter.detach())
            parameter.data = example.new_full((), float("nan")).expand(slot.shape)
    return flat
