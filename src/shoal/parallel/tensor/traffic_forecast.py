"""What tensor and sequence parallelism should send, worked out from the plain model: plain numbers, before anything is split.

``record_crossings`` runs the plain model once on an example and notes what passes where a split model communicates; it knows
nothing of the code that does. ``forecast_traffic`` turns the notes into calls and bytes under a plan::

                            forward                  backward
    embedding               all_reduce                                    every plan with tp
    column, whole input                              all_reduce           one for each input, however many layers read it
    row                     all_reduce
    column, cut input       all_gather               reduce_scatter       sp
    row, cut output         reduce_scatter           all_gather           sp
    stack                   all_gather at its exit   all_gather at entry  sp
    loss from split scores  all_gather of 3 numbers per target

With recompute the forward's calls inside blocks happen twice, up to the last tensor that a block keeps for its backward pass.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.trafficcounter import Traffic, TrafficCounts, add_traffic
from shoal.core.axes import Axis
from shoal.core.plan import Plan
from shoal.costs.tracer import ModuleCall, Record, Saved, TensorInfo, Tracer, preserved_state, tensors_in
from shoal.data.batchform import arguments_of
from shoal.parallel.analysis.structure import ModuleAnalysis, SplitKind
from shoal.parallel.tensor.sequence import check_stream, is_cut, parent_of

_SCORES_PER_TARGET = 3


class CrossingKind(StrEnum):
    """Where activations cross."""

    EMBEDDING = "embedding"
    COLUMN = "column"
    ROW = "row"
    ENTRY = "entry"
    EXIT = "exit"
    LOGITS = "logits"


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """One tensor that crosses, as the plain model has it."""

    kind: CrossingKind
    numel: int
    """Elements of the whole tensor, for the batch of the example."""
    needs_grad: bool
    block: str | None = None
    """The block that it lies in."""
    path: str = ""
    """The layer or the block at which it crosses."""
    in_cut: bool = False
    """It is the stream of a block whose sequence is cut under sequence parallelism."""
    is_repeated: bool = True
    """A recomputed forward comes as far as this."""


@dataclass(frozen=True, kw_only=True)
class CrossingRecord:
    """What passes where a split model communicates, in one forward pass of one example."""

    batch: int
    crossings: tuple[Crossing, ...]
    tail_is_pointwise: bool
    """After the last stack a context-parallel rank keeps its own positions."""

    def within(self, paths: Collection[str]) -> "CrossingRecord":
        """What crosses in some modules only: those of a pipeline rank's stages."""
        inside = tuple(f"{path}." for path in paths)
        kept = [crossing for crossing in self.crossings if f"{crossing.path}.".startswith(inside)]
        return replace(self, crossings=tuple(kept))


def record_crossings(model: nn.Module, analysis: ModuleAnalysis, example: Sequence[Tensor]) -> CrossingRecord:
    """Run the plain model once, in training, and note every crossing.

    Args:
        model: before anything was applied; neither its buffers nor generators move.
        analysis: what was found in it.
        example: inputs of one microbatch, the batch in dim 0.
    """
    reader = _CrossingReader(analysis)
    tracer = Tracer(model, paths=reader.paths, saved=True, keeps_graph=True)
    with preserved_state(model, training=True), torch.enable_grad():
        tracer.run(*arguments_of(model, example))
    return CrossingRecord(
        batch=int(example[0].shape[0]),
        crossings=tuple(reader.read(tracer.record)),
        tail_is_pointwise=analysis.tail_is_pointwise,
    )


def forecast_traffic(
    record: CrossingRecord, plan: Plan, *, batch: int, compute_bytes: int, weight_bytes: int, num_targets: int | None
) -> TrafficCounts:
    """Calls and bytes along ``tp`` of one microbatch, forward and backward.

    Args:
        record: of the plain model.
        plan: what is to run; under ``cp`` a rank has its share of the positions inside the blocks.
        batch: samples of the microbatch.
        compute_bytes: of an element in matrix products: 2 under bfloat16 autocast.
        weight_bytes: of an element of the weights and of the residual stream.
        num_targets: of this rank's microbatch, where the loss is computed from split scores; None where it is not.
    """
    if plan.tp == 1:
        return {}
    all_counts: list[TrafficCounts] = []
    for crossing in record.crossings:
        numel = crossing.numel * batch // record.batch
        numel //= plan.cp if _has_own_positions(crossing, record) else 1
        is_wide = crossing.kind in (CrossingKind.EMBEDDING, CrossingKind.ENTRY, CrossingKind.EXIT)
        num_bytes = numel * (weight_bytes if is_wide else compute_bytes)
        for operation, calls in _operations(crossing, plan):
            all_counts.append({(Axis.TENSOR.value, operation): Traffic(calls=calls, num_bytes=calls * num_bytes)})
    if num_targets is not None:
        score_bytes = max(weight_bytes, 4)
        num_bytes = plan.tp * _SCORES_PER_TARGET * num_targets * score_bytes
        all_counts.append({(Axis.TENSOR.value, "all_gather"): Traffic(calls=1, num_bytes=num_bytes)})
    return add_traffic(*all_counts)


def _has_own_positions(crossing: Crossing, record: CrossingRecord) -> bool:
    """True where a context-parallel rank has its own positions and not the whole sequence."""
    if crossing.kind is CrossingKind.LOGITS:
        return record.tail_is_pointwise
    return crossing.block is not None or crossing.kind in (CrossingKind.ENTRY, CrossingKind.EXIT)


def _operations(crossing: Crossing, plan: Plan) -> list[tuple[str, int]]:
    """The collectives of one crossing and how often each happens."""
    is_cut_now = plan.sp and crossing.in_cut
    forward, backward = {
        (CrossingKind.EMBEDDING, False): ("all_reduce", None),
        (CrossingKind.LOGITS, False): (None, "all_reduce"),
        (CrossingKind.COLUMN, False): (None, "all_reduce"),
        (CrossingKind.ROW, False): ("all_reduce", None),
        (CrossingKind.COLUMN, True): ("all_gather", "reduce_scatter"),
        (CrossingKind.ROW, True): ("reduce_scatter", "all_gather"),
        (CrossingKind.ENTRY, True): (None, "all_gather"),
        (CrossingKind.EXIT, True): ("all_gather", None),
    }.get((crossing.kind, is_cut_now), (None, None))
    found = []
    if forward is not None:
        is_again = plan.recompute != "none" and crossing.block is not None and crossing.is_repeated
        found.append((forward, 2 if is_again else 1))
    if backward is not None and crossing.needs_grad:
        found.append((backward, 1))
    return found


class _CrossingReader:
    """Finds the crossings in the record of a plain model."""

    def __init__(self, analysis: ModuleAnalysis) -> None:
        self._stacks = {path: stack for stack in analysis.stacks for path in stack.blocks}
        self._cut = {path: is_cut(analysis, stack) for path, stack in self._stacks.items()}
        self._attentions = {heads.path for heads in analysis.attentions if heads.is_torch}
        inside = tuple(f"{path}." for path in self._attentions)
        self._splits = {split.path: split.kind for split in analysis.splits if not split.path.startswith(inside)}
        self.paths = {*self._stacks, *self._attentions, *self._splits}
        """The modules whose calls are needed."""
        self._found: list[Crossing] = []
        self._block: str | None = None
        self._is_cut = False
        self._given: tuple[TensorInfo, ...] = ()
        """What the running block was given beside its stream."""
        self._seen: dict[str, set[TensorInfo]] = {}
        self._pending: list[int] = []
        """Row layers' sums after which nothing has been saved yet."""

    def read(self, record: Record) -> list[Crossing]:
        for event in record.events:
            if isinstance(event, Saved):
                self._pending = []
            elif isinstance(event, ModuleCall):
                self._enter(event.path, event.args, event.kwargs)
            else:
                self._leave(event.path, event.output)
        return self._found

    def _enter(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if path in self._stacks:
            self._begin_block(path, args, kwargs)
        if path in self._attentions:
            self._columns(path, args, kwargs)
        elif self._splits.get(path) is SplitKind.COLUMN:
            self._columns(parent_of(path), args, kwargs)
        elif self._splits.get(path) is SplitKind.LOGITS:
            self._note(CrossingKind.LOGITS, args[0], path=path)

    def _leave(self, path: str, output: Any) -> None:
        if path in self._attentions:
            if output[1] is not None:
                self._note(CrossingKind.ROW, output[1], path=path, is_whole=True)
            self._row(output[0], path)
        elif self._splits.get(path) is SplitKind.ROW:
            self._row(output, path)
        elif self._splits.get(path) is SplitKind.VOCABULARY:
            self._note(CrossingKind.EMBEDDING, output, path=path)
        if path in self._stacks:
            self._end_block(path, output)

    def _begin_block(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._is_cut = self._cut[path]
        key = check_stream(args, kwargs, TensorInfo) if self._is_cut else 0
        if self._is_cut and path == self._stacks[path].blocks[0]:
            self._note(CrossingKind.ENTRY, args[0] if isinstance(key, int) else kwargs[key], path=path)
        beside = tensors_in([*args[1:], *(value for name, value in kwargs.items() if name != key)])
        self._block, self._given, self._pending = path, tuple(beside), []

    def _end_block(self, path: str, output: Any) -> None:
        # What no kept tensor follows is not run again: torch's checkpoint stops at the last one.
        for index in self._pending:
            self._found[index] = replace(self._found[index], is_repeated=False)
        self._block, self._given, self._pending = None, (), []
        if self._is_cut and path == self._stacks[path].blocks[-1]:
            self._note(CrossingKind.EXIT, tensors_in(output)[0], path=path)
        self._is_cut = False

    def _columns(self, parent: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """One crossing for each tensor that goes into the column layers of a parent."""
        inputs = [*args[:3], *(kwargs[name] for name in ("query", "key", "value") if name in kwargs)]
        seen = self._seen.setdefault(parent, set())
        for x in inputs:
            if isinstance(x, TensorInfo) and x not in seen:
                seen.add(x)
                self._note(CrossingKind.COLUMN, x, path=parent, is_whole=x in self._given)

    def _row(self, output: TensorInfo, path: str) -> None:
        self._note(CrossingKind.ROW, output, path=path)
        self._pending.append(len(self._found) - 1)

    def _note(self, kind: CrossingKind, x: TensorInfo, *, path: str, is_whole: bool = False) -> None:
        self._found.append(
            Crossing(
                kind=kind,
                numel=x.numel(),
                needs_grad=x.requires_grad,
                block=self._block,
                path=path,
                in_cut=self._is_cut and not is_whole,
            )
        )
