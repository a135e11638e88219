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

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.trafficcounter import Traffic, TrafficCounts, add_traffic
from shoal.core.axes import Axis
from shoal.core.plan import Plan
from shoal.parallel.analysis.structure import ModuleAnalysis, SplitKind
from shoal.parallel.tensor.sequence import is_cut, parent_of, stream_key
from shoal.telemetry.draws import keeping_draws

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
        model: before anything was applied; a copy of it runs, so neither buffers nor generators move.
        analysis: what was found in it.
        example: inputs of one microbatch, the batch in dim 0.
    """
    surveyor = _Surveyor(copy.deepcopy(model).train(), analysis)
    with keeping_draws(), torch.enable_grad():
        surveyor.run(example)
    return CrossingRecord(
        batch=int(example[0].shape[0]),
        crossings=tuple(surveyor.found),
        tail_is_pointwise=analysis.tail_is_pointwise,
    )


def forecast_traffic(
    survey: CrossingRecord, plan: Plan, *, batch: int, compute_bytes: int, weight_bytes: int, num_targets: int | None
) -> TrafficCounts:
    """Calls and bytes along ``tp`` of one microbatch, forward and backward.

    Args:
        survey: of the plain model.
        plan: what is to run; under ``cp`` a rank has its share of the positions inside the blocks.
        batch: samples of the microbatch.
        compute_bytes: of an element in matrix products: 2 under bfloat16 autocast.
        weight_bytes: of an element of the weights and of the residual stream.
        num_targets: of this rank's microbatch, where the loss is computed from split scores; None where it is not.
    """
    if plan.tp == 1:
        return {}
    all_counts: list[TrafficCounts] = []
    for crossing in survey.crossings:
        numel = crossing.numel * batch // survey.batch
        numel //= plan.cp if _has_own_positions(crossing, survey) else 1
        is_wide = crossing.kind in (CrossingKind.EMBEDDING, CrossingKind.ENTRY, CrossingKind.EXIT)
        num_bytes = numel * (weight_bytes if is_wide else compute_bytes)
        for operation, calls in _operations(crossing, plan):
            all_counts.append({(Axis.TENSOR.value, operation): Traffic(calls=calls, num_bytes=calls * num_bytes)})
    if num_targets is not None:
        score_bytes = max(weight_bytes, 4)
        num_bytes = plan.tp * _SCORES_PER_TARGET * num_targets * score_bytes
        all_counts.append({(Axis.TENSOR.value, "all_gather"): Traffic(calls=1, num_bytes=num_bytes)})
    return add_traffic(*all_counts)


def _has_own_positions(crossing: Crossing, survey: CrossingRecord) -> bool:
    """True where a context-parallel rank has its own positions and not the whole sequence."""
    if crossing.kind is CrossingKind.LOGITS:
        return survey.tail_is_pointwise
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


class _Surveyor:
    """Hooks on a copy of the plain model that note what passes."""

    def __init__(self, model: nn.Module, analysis: ModuleAnalysis) -> None:
        self.model = model
        self.found: list[Crossing] = []
        self._block: str | None = None
        self._is_cut = False
        self._given: tuple[Any, ...] = ()
        self._seen: dict[str, list[Tensor]] = {}
        self._pending: list[int] = []
        for stack in analysis.stacks:
            cut = is_cut(analysis, stack)
            for path in stack.blocks:
                block = model.get_submodule(path)
                block.register_forward_pre_hook(self._begin(path, cut, path == stack.blocks[0]), with_kwargs=True)
                block.register_forward_hook(self._end(path, cut, path == stack.blocks[-1]), always_call=True)
        torch_heads = tuple(f"{heads.path}." for heads in analysis.attentions if heads.is_torch)
        for heads in analysis.attentions:
            if heads.is_torch:
                attention = model.get_submodule(heads.path)
                attention.register_forward_pre_hook(self._columns(heads.path), with_kwargs=True)
                attention.register_forward_hook(partial(self._attended, heads.path))
        for split in analysis.splits:
            if not (torch_heads and split.path.startswith(torch_heads)):
                self._watch_layer(split.path, split.kind)

    def run(self, example: Sequence[Tensor]) -> None:
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            self.model(*example)

    def _watch_layer(self, path: str, kind: SplitKind) -> None:
        layer = self.model.get_submodule(path)
        if kind is SplitKind.COLUMN:
            layer.register_forward_pre_hook(self._columns(parent_of(path)), with_kwargs=True)
        elif kind is SplitKind.LOGITS:
            layer.register_forward_pre_hook(lambda _, args: self._note(CrossingKind.LOGITS, args[0], path=path))
        elif kind is SplitKind.ROW:
            layer.register_forward_hook(lambda _, args, output: self._rows(output, path))
        else:
            layer.register_forward_hook(lambda _, args, output: self._note(CrossingKind.EMBEDDING, output, path=path))

    def _begin(self, path: str, cut: bool, is_first: bool) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            key = stream_key(args, kwargs) if cut else 0
            stream = args[0] if isinstance(key, int) else kwargs[key]
            self._is_cut = cut
            if is_first and cut:
                self._note(CrossingKind.ENTRY, stream, path=path)
            beside = [*args[1:], *(value for name, value in kwargs.items() if name != key)]
            self._block, self._given, self._pending = path, tuple(beside), []

        return hook

    def _end(self, path: str, cut: bool, is_last: bool) -> Any:
        def hook(_: nn.Module, args: Any, output: Any) -> None:
            # What no kept tensor follows is not run again: torch's checkpoint stops at the last one.
            for index in self._pending:
                self.found[index] = replace(self.found[index], is_repeated=False)
            self._block, self._given, self._pending = None, (), []
            if cut and is_last:
                self._note(CrossingKind.EXIT, output if isinstance(output, Tensor) else output[0], path=path)
            self._is_cut = False

        return hook

    def _columns(self, parent: str) -> Any:
        """One crossing for each tensor that goes into the column layers of a parent."""

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs = [*args[:3], *(kwargs[name] for name in ("query", "key", "value") if name in kwargs)]
            for x in inputs:
                seen = self._seen.setdefault(parent, [])
                if isinstance(x, Tensor) and not any(x is other for other in seen):
                    # Held, so that no later tensor can have its identity.
                    seen.append(x)
                    is_whole = any(x is given for given in self._given)
                    self._note(CrossingKind.COLUMN, x, path=parent, is_whole=is_whole)

        return hook

    def _attended(self, path: str, _: nn.Module, args: Any, output: Any) -> None:
        if output[1] is not None:
            self._note(CrossingKind.ROW, output[1], path=path, is_whole=True)
        self._rows(output[0], path)

    def _rows(self, output: Tensor, path: str) -> None:
        self._note(CrossingKind.ROW, output, path=path)
        self._pending.append(len(self.found) - 1)

    def _note(self, kind: CrossingKind, x: Tensor, *, path: str, is_whole: bool = False) -> None:
        self.found.append(
            Crossing(
                kind=kind,
                numel=x.numel(),
                needs_grad=x.requires_grad,
                block=self._block,
                path=path,
                in_cut=self._is_cut and not is_whole,
            )
        )

    def _pack(self, tensor: Tensor) -> Tensor:
        self._pending = []
        return tensor
