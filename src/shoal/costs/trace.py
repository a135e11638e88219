"""Any module as a list of layers with their costs per sample, from two traced forward passes on tensors without memory.

torch's own estimators count sums for a whole module, or need a GPU; a planner needs the sizes of each product, what each layer
keeps under each kind of recompute, and what a technique would divide. Two batches of different size are traced: what does not
grow with the batch is no sample's, such as reading weights and tables of positions.

Not seen: what torch's kernels for recurrent layers keep in workspaces of their own, whose size only running them tells; and what
an ``autograd.Function`` holds by other means than ``save_for_backward``.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._pytree import tree_map

from shoal.core.errors import RequestError
from shoal.costs.blocks import find_blocks, is_under
from shoal.costs.fake import fake_like, faked, run_faked, without_memory
from shoal.costs.layers import Layer, LayerKind, ModelCosts, Op, OpKind, SavedBytes, TensorSplit
from shoal.costs.observe import LayerUse, Observer, OpUse, Work, num_received, rows_of
from shoal.costs.operations import OneKernel
from shoal.costs.repeats import expand, repeating
from shoal.costs.tracer import Level, Tracer, preserved_state, tensors_in

INSTEAD = (
    "give the shape of a transformer instead: [planner.shape] with layers, hidden, heads, ffn, vocab and sequence, and with "
    "experts, chosen_experts and expert_ffn where it has experts"
)

_WANTS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)

Loss = Callable[[Any, Tensor], Tensor]


Batches = tuple[int, int]


Arguments = Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]]
"""Flat inputs -> what a module is called with."""


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """One forward pass."""

    layers: list[LayerUse]
    output_bytes: int
    """Bytes of the scores."""
    cuts: dict[str, TensorSplit]
    """Of the parameters."""
    experts: dict[str, int]
    """Matrices that a parameter is made of, where rows are dealt out to them."""


@dataclass(frozen=True, kw_only=True)
class _Settings:
    units: Sequence[str] | None
    blocks: Sequence[str]
    cuts: Mapping[str, TensorSplit]
    compute_dtype: torch.dtype | None
    loss: Loss | None
    targets: Any
    batch_dim: int
    device: str
    arguments: Arguments | None = None


def trace_module(
    module: nn.Module,
    inputs: Sequence[Tensor] | Mapping[str, Tensor],
    *,
    name: str,
    units: Sequence[str] | None = None,
    blocks: Sequence[str] | None = None,
    cuts: Mapping[str, TensorSplit] | None = None,
    compute_dtype: torch.dtype | None = None,
    loss: Loss | None = None,
    targets: Any = None,
    batch_dim: int = 0,
    device: str = "cpu",
    arguments: Arguments | None = None,
) -> ModelCosts:
    """A module as a list of layers with their costs, per sample, as it trains.

    Args:
        module: any module, in memory or on the meta device; left as it was.
        inputs: an example, for its shapes and types; its values do not matter, and it may be on the meta device.
        name: of the model.
        units: the modules at whose calls layers begin; None for the blocks and what lies around them.
        blocks: the modules that are blocks; None for lists of modules of one kind, as the structure shows them.
        cuts: what tensor parallelism would do to modules: ``COLUMNS`` or ``ROWS`` of a linear layer or an embedding, ``ALL`` for
            an ``nn.MultiheadAttention``.
        compute_dtype: what layers compute in under autocast; None for the type of their weights.
        loss: (output, targets) -> a number; what it computes and keeps counts with the last layer. None leaves it out.
        targets: an example of what the loss compares with, as ``inputs``.
        batch_dim: the dim of the inputs that counts samples.
        device: the type of device that the costs are for; on any but ``cpu``, attention with dropout is one kernel.
        arguments: makes ``args`` and ``kwargs`` of the flat inputs; each is an argument in its place when left out.

    Raises:
        RequestError: the forward pass cannot run without values, or takes another way for another number of samples.
    """
    chosen = [block for row in find_blocks(module) for block in row] if blocks is None else list(blocks)
    num_samples = max(2, _batch_of(inputs, batch_dim))
    batches = num_samples, 2 * num_samples
    settings = _Settings(
        units=units,
        blocks=chosen,
        cuts=cuts or {},
        compute_dtype=compute_dtype,
        loss=loss,
        targets=targets,
        batch_dim=batch_dim,
        device=device,
        arguments=arguments,
    )
    with preserved_state(module, training=True), faked(module) as mode:
        passes = [_run(module, inputs, batch, mode, settings) for batch in batches]
    layers = _layers(module, *passes, batches=batches)
    heads = {pair for layer in passes[0].layers for pair in layer.work.heads}
    query_heads, kv_heads = {pair[0] for pair in heads}, {pair[1] for pair in heads}
    dtype = compute_dtype or next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    return ModelCosts(
        name=name,
        layers=layers,
        tokens=_tokens(inputs, batch_dim, has_attention=bool(heads)),
        item_bytes=dtype.itemsize,
        heads=query_heads.pop() if len(query_heads) == 1 else None,
        kv_heads=kv_heads.pop() if len(kv_heads) == 1 else None,
        experts=math.gcd(*passes[0].experts.values()) or 1,
    )


def _run(
    module: nn.Module,
    inputs: Sequence[Tensor] | Mapping[str, Tensor],
    batch: int,
    mode: FakeTensorMode,
    settings: _Settings,
) -> _Pass:
    samples, dtype = _batch_of(inputs, settings.batch_dim), settings.compute_dtype
    fake = partial(_faked_input, mode=mode, samples=samples, batch=batch, dim=settings.batch_dim)
    args = [] if isinstance(inputs, Mapping) else [fake(tensor) for tensor in inputs]
    kwargs = {key: fake(tensor) for key, tensor in inputs.items()} if isinstance(inputs, Mapping) else {}
    if settings.arguments is not None:
        spread, kwargs = settings.arguments(args)
        args = list(spread)
    targets = None if settings.targets is None else tree_map(fake, settings.targets)
    tracer = Tracer(module, level=Level.OPERATIONS, first=True, saved=True, execute=partial(_execute, mode))

    def then(output: Any) -> None:
        if settings.loss is not None and targets is not None:
            settings.loss(output, targets)

    with ExitStack() as stack:
        stack.enter_context(repeating(tracer, settings.blocks))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(nullcontext() if settings.device == "cpu" else OneKernel())
        stack.enter_context(mode)
        stack.enter_context(torch.autocast("cpu", dtype=dtype) if dtype is not None else nullcontext())
        try:
            output = tracer.run(args, kwargs, then=then)
        # The user's code may raise anything where it meets a tensor without values.
        except Exception as error:
            raise RequestError(_refusal(module, tracer.record.running[-1], tracer.record.last, error)) from error
        output_bytes = num_received(tracer.plain(getattr(output, "logits", output)))
        at_hand = tensors_in(tracer.plain((args, kwargs, targets)))
    observer = Observer(
        module,
        tracer.record,
        units=settings.units,
        blocks=settings.blocks,
        splits=settings.cuts,
        at_hand=at_hand,
    )
    observer.read(expand(tracer.record))
    return _Pass(
        layers=observer.layers,
        output_bytes=output_bytes,
        cuts=observer.cut_of_weight,
        experts=observer.experts_of_weight,
    )


def _execute(mode: FakeTensorMode, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    args, kwargs = without_memory((tuple(args), dict(kwargs)), mode)
    return run_faked(func, args, kwargs)


def _refusal(module: nn.Module, path: str, operation: str, error: Exception) -> str:
    owner = module.get_submodule(path)
    where = f"{path!r} ({type(owner).__name__})" if path else type(owner).__name__
    reason = next(iter(str(error).splitlines()), "").rstrip(".") or type(error).__name__
    fails = f"{where} fails at {operation or 'its first operation'}, {type(error).__name__}: {reason}"
    if isinstance(error, _WANTS_VALUES):
        return (
            f"the module cannot be traced without memory: {fails}; its forward pass may not depend on the values of tensors. "
            f"Or {INSTEAD}"
        )
    return f"the module's forward pass fails: {fails}; mend it there. If it runs on tensors that have values, {INSTEAD}"


def _layers(module: nn.Module, one: _Pass, two: _Pass, *, batches: Batches) -> tuple[Layer, ...]:
    names = [layer.name for layer in one.layers]
    if names != [layer.name for layer in two.layers]:
        raise RequestError(
            f"the module calls other parts for {batches[1]} samples than for {batches[0]}; it must take the same way for every "
            f"batch. Or {INSTEAD}"
        )
    sent = [
        _growth(before, after, batches)
        for before, after in zip(
            [*(layer.received for layer in one.layers[1:]), one.output_bytes],
            [*(layer.received for layer in two.layers[1:]), two.output_bytes],
            strict=True,
        )
    ]
    received = [0.0, *sent[:-1]]
    weights = _weights(module, one)
    trained = {name: tuple(weight.shape) for name, weight in module.named_parameters() if weight.requires_grad}
    kinds = _kinds(one.layers)
    layers = []
    for place, (before, after) in enumerate(zip(one.layers, two.layers, strict=True)):
        _check_alike(before.work, after.work, batches=batches, name=before.name)
        num_pairs = len(before.work.sums)
        whole, split, routed, tied_to, names = weights[place]
        layers.append(
            Layer(
                name=before.name,
                kind=kinds[place],
                ops=_ops_of_sample(before.work, after.work, batches),
                whole_weights=whole,
                split_weights=split,
                expert_weights=routed,
                kept=_saved_of_sample(before.work, after.work, batches, received=received[place]),
                output_bytes=sent[place],
                num_pairs=num_pairs,
                pair_bytes=_total_growth(before.work.sums, after.work.sums, batches) / max(1, num_pairs),
                routed_bytes=_total_growth(before.work.dealt, after.work.dealt, batches),
                kv_bytes=_total_growth(before.work.carried, after.work.carried, batches),
                image_rows=(rows := rows_of(before.work.images)),
                halo_bytes=_halo_bytes(before.work, after.work, batches) if rows else 0.0,
                tied_to=tied_to,
                parameters=tuple((name, trained[name]) for name in names if name in trained),
            )
        )
    return tuple(layers)


def _halo_bytes(one: Work, two: Work, batches: Batches) -> float:
    before, after = ([image.halo_bytes for image in done.images] for done in (one, two))
    return _total_growth(before, after, batches)


def _kinds(layers: Sequence[LayerUse]) -> list[LayerKind]:
    places = [place for place, layer in enumerate(layers) if layer.is_block]
    if not places:
        return [LayerKind.OTHER] * len(layers)
    kinds = []
    for place, layer in enumerate(layers):
        around = LayerKind.EMBEDDING if place < places[0] else LayerKind.HEAD if place > places[-1] else LayerKind.OTHER
        kinds.append(LayerKind.BLOCK if layer.is_block else around)
    return kinds


def _weights(module: nn.Module, seen: _Pass) -> list[tuple[float, float, float, str | None, list[str]]]:
    """Of each layer: elements that stay whole, that are cut, and of experts; the layer whose weights it reads too; its own.

    A weight belongs to the first layer that reads it; one that nobody reads, to the layer whose module it is in, else the last.
    """
    owner: dict[str, int] = {}
    tied: list[str | None] = []
    for place, layer in enumerate(seen.layers):
        shared = [owner[name] for name in layer.weights if name in owner]
        tied.append(seen.layers[shared[0]].name if shared else None)
        for name in layer.weights:
            owner.setdefault(name, place)
    sums = [[0.0, 0.0, 0.0] for _ in seen.layers]
    names: list[list[str]] = [[] for _ in seen.layers]
    for name, parameter in module.named_parameters():
        if name not in owner:
            holders = [place for place, layer in enumerate(seen.layers) if is_under(name, layer.name)]
            owner[name] = holders[0] if holders else len(seen.layers) - 1
        # The bias of a layer that is cut by rows is added after the sum.
        cut = seen.cuts[name]
        is_cut = cut is TensorSplit.COLUMNS or (cut is TensorSplit.ROWS and parameter.ndim > 1)
        sums[owner[name]][2 if name in seen.experts else int(is_cut)] += parameter.numel()
        names[owner[name]].append(name)
    return [
        (whole, split, routed, name, own) for (whole, split, routed), name, own in zip(sums, tied, names, strict=True)
    ]


def _batch_of(inputs: Sequence[Tensor] | Mapping[str, Tensor], dim: int) -> int:
    return next((tensor.shape[dim] for tensor in _values(inputs) if tensor.ndim > dim), 1)


def _faked_input(tensor: Tensor, *, mode: FakeTensorMode, samples: int, batch: int, dim: int) -> Tensor:
    """A tensor without values that has another number of samples."""
    shape = list(tensor.shape)
    if len(shape) > dim and shape[dim] == samples:
        shape[dim] = batch
    return fake_like(torch.empty(shape, dtype=tensor.dtype, device="meta"), mode)


def _tokens(inputs: Sequence[Tensor] | Mapping[str, Tensor], dim: int, *, has_attention: bool) -> float:
    """Positions of a sample: of the last input that is made of token ids, else of a sequence of features that is attended to."""
    shapes = [(tensor, [size for place, size in enumerate(tensor.shape) if place != dim]) for tensor in _values(inputs)]
    ids = [rest[0] for tensor, rest in shapes if len(rest) == 1 and not tensor.is_floating_point()]
    if ids:
        return float(ids[-1])
    features = [rest[0] for _, rest in shapes if len(rest) == 2]
    return float(features[0]) if has_attention and features else 1.0


def _values(inputs: Sequence[Tensor] | Mapping[str, Tensor]) -> Iterable[Tensor]:
    return inputs.values() if isinstance(inputs, Mapping) else inputs


def _check_alike(one: Work, two: Work, *, batches: Batches, name: str) -> None:
    """Make sure that both batches did the same.

    Raises:
        RequestError: the forward pass takes another way for another number of samples.
    """
    kinds = [[(op.kind, op.cut, op.width, op.is_causal) for op in work.ops] for work in (one, two)]
    if one.lengths() != two.lengths() or kinds[0] != kinds[1]:
        raise RequestError(
            f"{name!r} computes something else for {batches[1]} samples than for {batches[0]} ({len(two.ops)} operations after "
            f"{len(one.ops)}), so nothing can be said of one; make its forward pass the same for every batch"
        )


def _ops_of_sample(one: Work, two: Work, batches: Batches) -> tuple[Op, ...]:
    """The operations of one sample, equal ones once, in the order in which they first ran."""
    found = [op for pair in zip(one.ops, two.ops, strict=True) for op in _op_of_sample(*pair, batches)]
    counts = Counter[Op]()
    for op in found:
        counts[replace(op, count=1)] += op.count
    return tuple(replace(op, count=count) for op, count in counts.items())


def _saved_of_sample(one: Work, two: Work, batches: Batches, *, received: float) -> SavedBytes:
    """What one sample keeps."""
    places = {"whole": 0.0, "split": 0.0, "scores": 0.0}
    for before, after in zip(one.saved, two.saved, strict=True):
        places[before.place] += _growth(before.num_bytes, after.num_bytes, batches)
    return SavedBytes(**places, boundary=received)


def _growth(before: float, after: float, batches: Batches) -> float:
    """What a sample adds."""
    return (after - before) / (batches[1] - batches[0])


def _total_growth(before: Iterable[float], after: Iterable[float], batches: Batches) -> float:
    """What a sample adds to a sum."""
    return _growth(sum(before), sum(after), batches)


def _op_of_sample(before: OpUse, after: OpUse, batches: Batches) -> Iterator[Op]:
    if before.kind is OpKind.MEMORY:
        size = _growth(before.sizes[0], after.sizes[0], batches)
        if size:
            yield Op(kind=OpKind.MEMORY, num_bytes=size, cut=before.cut)
        return
    sizes = _sizes_of_sample(before.sizes, after.sizes, batches)
    if sizes is None:
        return
    if before.kind is OpKind.MATMUL:
        count, rows, inner, outer = sizes
        whole = int(count) if count == int(count) else 1
        yield Op(
            kind=OpKind.MATMUL,
            rows=rows * count / whole,
            inner=inner,
            outer=outer,
            cut=before.cut,
            experts=before.experts,
            count=whole,
        )
        return
    samples, heads, rows, outer = sizes
    yield Op(
        kind=OpKind.ATTENTION,
        rows=rows * samples,
        inner=before.width,
        outer=outer,
        heads=heads,
        cut=before.cut,
        causal=before.is_causal,
    )


def _sizes_of_sample(before: Sequence[int], after: Sequence[int], batches: Batches) -> list[float] | None:
    """The sizes of a product on one sample; None where it does not grow with the batch.

    Where the batch is in more than one size, or not the only thing in it, rows are such that the products are as many.
    """
    added = _growth(math.prod(before), math.prod(after), batches)
    if added == 0:
        return None
    sizes: list[float] = list(before)
    grown = [place for place, (one, two) in enumerate(zip(before, after, strict=True)) if one != two]
    if len(grown) == 1 and before[grown[0]] * batches[1] == after[grown[0]] * batches[0]:
        sizes[grown[0]] /= batches[0]
        return sizes
    # Rows come second in a product and third in an attention.
    rows = 1 if len(grown) and grown[0] != 2 else 2
    rest = math.prod(size for place, size in enumerate(before) if place != rows)
    sizes[rows] = added / rest
    return sizes
