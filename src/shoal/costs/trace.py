"""Any module as a chain, by one look at its forward pass on tensors without memory.

torch's own estimators count sums for a whole module, or need a GPU; a planner needs the sizes of each product, what each layer
keeps under each kind of recompute, and what a technique would divide.

Not seen: what torch's kernels for recurrent layers keep in workspaces of their own, whose size only running them tells; and what
an ``autograd.Function`` holds by other means than ``save_for_backward``.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from shoal.core.errors import RequestError
from shoal.costs.alike import imitating
from shoal.costs.blocks import find_blocks, is_under
from shoal.costs.fake import fake_like, faked
from shoal.costs.layers import Layer, LayerKind, ModelCosts, TensorSplit
from shoal.costs.links import Done, Link, Links, num_received
from shoal.costs.operations import OneKernel, rows_of
from shoal.costs.persample import Batches, check_alike, growth, kept_of_sample, ops_of_sample, total_growth
from shoal.costs.record import Recorder
from shoal.costs.tracer import preserved_state

INSTEAD = (
    "give the shape of a transformer instead: [planner.shape] with layers, hidden, heads, ffn, vocab and sequence, and with "
    "experts, chosen_experts and expert_ffn where it has experts"
)

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A place in a list of modules; ``w1`` is a name."""
_WANTS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)

Loss = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """One forward pass."""

    links: list[Link]
    put_out: int
    """Bytes of the scores."""
    names: list[str]
    cuts: list[TensorSplit]
    """Of the parameters, by number."""
    experts: dict[int, int]
    """Matrices that a parameter is made of, where rows are dealt out to them, by its number."""


@dataclass(frozen=True, kw_only=True)
class _Settings:
    units: Sequence[str] | None
    blocks: Sequence[str]
    cuts: Mapping[str, TensorSplit]
    compute_dtype: torch.dtype | None
    loss: Loss | None
    targets: Tensor | None
    batch_dim: int
    device: str


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
    targets: Tensor | None = None,
    batch_dim: int = 0,
    device: str = "cpu",
) -> ModelCosts:
    """A module as a chain of layers, per sample, as it trains.

    Args:
        module: any module, in memory or on the meta device; left as it was.
        inputs: an example, for its shapes and types; its values do not matter, and it may be on the meta device.
        name: of the chain.
        units: the modules at whose calls links begin; None for the blocks and what lies around them.
        blocks: the modules that are blocks; None for rows of modules of one kind, as the structure shows them.
        cuts: what tensor parallelism would do to modules: ``COLUMNS`` or ``ROWS`` of a linear layer or an embedding, ``ALL`` for
            an ``nn.MultiheadAttention``.
        compute_dtype: what layers compute in under autocast; None for the type of their weights.
        loss: (output, targets) -> a number; what it computes and keeps counts with the last link. None leaves it out.
        targets: an example of what the loss compares with, as ``inputs``.
        batch_dim: the dim of the inputs that counts samples.
        device: the type of device that the chain is for; on any but ``cpu``, attention with dropout is one kernel.

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
    )
    with preserved_state(module, training=True), faked(module) as mode:
        passes = [_run(module, inputs, batch, mode, settings) for batch in batches]
    layers = _layers(module, *passes, batches=batches)
    heads = {pair for link in passes[0].links for pair in link.done.heads}
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
    links = Links(module, units=settings.units, blocks=settings.blocks)
    recorder = Recorder(module, links, mode, cuts=settings.cuts)
    dtype = settings.compute_dtype
    with ExitStack() as stack:
        stack.enter_context(imitating(module, recorder, settings.blocks))
        samples = _batch_of(inputs, settings.batch_dim)
        fake = partial(_faked_input, mode=mode, samples=samples, batch=batch, dim=settings.batch_dim)
        args = [] if isinstance(inputs, Mapping) else [fake(tensor) for tensor in inputs]
        kwargs = {key: fake(tensor) for key, tensor in inputs.items()} if isinstance(inputs, Mapping) else {}
        targets = None if settings.targets is None else fake(settings.targets)
        recorder.leave_out([*args, *kwargs.values(), *([] if targets is None else [targets])])
        stack.enter_context(links.watching())
        stack.enter_context(torch.enable_grad())
        stack.enter_context(nullcontext() if settings.device == "cpu" else OneKernel())
        stack.enter_context(mode)
        stack.enter_context(torch.autocast("cpu", dtype=dtype) if dtype is not None else nullcontext())
        try:
            with recorder.recording():
                output = module(*args, **kwargs)
                if settings.loss is not None and targets is not None:
                    settings.loss(output, targets)
        # The user's code may raise anything where it meets a tensor without values.
        except Exception as error:
            raise RequestError(_refusal(module, links.running[-1], recorder.last, error)) from error
        put_out = num_received(getattr(output, "logits", output))
    return _Pass(
        links=links.all,
        put_out=put_out,
        names=recorder.names,
        cuts=recorder.cut_of_weight,
        experts=recorder.experts_of_weight,
    )


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
    names = [link.name for link in one.links]
    if names != [link.name for link in two.links]:
        raise RequestError(
            f"the module calls other parts for {batches[1]} samples than for {batches[0]}; it must take the same way for every "
            f"batch. Or {INSTEAD}"
        )
    sent = [
        growth(before, after, batches)
        for before, after in zip(
            [*(link.received for link in one.links[1:]), one.put_out],
            [*(link.received for link in two.links[1:]), two.put_out],
            strict=True,
        )
    ]
    received = [0.0, *sent[:-1]]
    weights = _weights(module, one)
    kinds = _kinds(one.links)
    layers = []
    for place, (before, after) in enumerate(zip(one.links, two.links, strict=True)):
        check_alike(before.done, after.done, batches=batches, name=before.name)
        num_pairs = len(before.done.sums)
        whole, split, routed, tied_to = weights[place]
        layers.append(
            Layer(
                name=before.name,
                kind=kinds[place],
                ops=ops_of_sample(before.done, after.done, batches),
                whole_weights=whole,
                split_weights=split,
                expert_weights=routed,
                kept=kept_of_sample(before.done, after.done, batches, received=received[place]),
                output_bytes=sent[place],
                num_pairs=num_pairs,
                pair_bytes=total_growth(before.done.sums, after.done.sums, batches) / max(1, num_pairs),
                routed_bytes=total_growth(before.done.dealt, after.done.dealt, batches),
                kv_bytes=total_growth(before.done.carried, after.done.carried, batches),
                image_rows=(rows := rows_of(before.done.images)),
                halo_bytes=_halo_bytes(before.done, after.done, batches) if rows else 0.0,
                tied_to=tied_to,
            )
        )
    return tuple(layers)


def _halo_bytes(one: Done, two: Done, batches: Batches) -> float:
    before, after = ([image.halo_bytes for image in done.images] for done in (one, two))
    return total_growth(before, after, batches)


def _kinds(links: Sequence[Link]) -> list[LayerKind]:
    places = [place for place, link in enumerate(links) if link.is_block]
    if not places:
        return [LayerKind.OTHER] * len(links)
    kinds = []
    for place, link in enumerate(links):
        around = LayerKind.EMBEDDING if place < places[0] else LayerKind.HEAD if place > places[-1] else LayerKind.OTHER
        kinds.append(LayerKind.BLOCK if link.is_block else around)
    return kinds


def _weights(module: nn.Module, seen: _Pass) -> list[tuple[float, float, float, str | None]]:
    """Of each link: elements that stay whole, that are cut, and of experts; and the link whose weights it reads too.

    A weight belongs to the first link that reads it; one that nobody reads, to the link whose module it is in, else the last.
    """
    parameters = dict(enumerate(module.parameters()))
    owner: dict[int, int] = {}
    tied: list[str | None] = []
    for place, link in enumerate(seen.links):
        shared = [owner[number] for number in link.weights if number in owner]
        tied.append(seen.links[shared[0]].name if shared else None)
        for number in link.weights:
            owner.setdefault(number, place)
    places = {link.name: place for place, link in enumerate(seen.links)}
    for number in parameters:
        if number not in owner:
            holders = [place for name, place in places.items() if is_under(seen.names[number], name)]
            owner[number] = holders[0] if holders else len(seen.links) - 1
    sums = [[0.0, 0.0, 0.0] for _ in seen.links]
    # Blocks that are imitated run nothing: theirs are those of the same name, but for its numbers, and shape as one's that ran.
    alike = [(_NUMBER.sub("", seen.names[number]), parameter.shape) for number, parameter in parameters.items()]
    experts = {alike[number] for number in seen.experts}
    for number, parameter in parameters.items():
        # The bias of a layer that is cut by rows is added after the sum.
        is_cut = seen.cuts[number] is TensorSplit.COLUMNS or (
            seen.cuts[number] is TensorSplit.ROWS and parameter.ndim > 1
        )
        sums[owner[number]][2 if alike[number] in experts else int(is_cut)] += parameter.numel()
    return [(whole, split, routed, name) for (whole, split, routed), name in zip(sums, tied, strict=True)]


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
