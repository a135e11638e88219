"""Context parallelism: a sequence too long for one rank is shared by several, for any model with a stack of blocks.

    tokens (B, S) -> embedding -> | cut | block, block, ... | -> norm, head -> loss over own positions
                     whole, on      L = S / cp positions,       own positions, or gathered at the stack's
                     every rank     attention over all S        end where what follows mixes positions

What comes before a stack runs whole on every rank, so that positions, masks and tables are the model's own. Cutting is plain
indexing. Every rank's backward pass therefore gives its part of the gradient of the sum of all ranks' losses, and summing every
gradient over cp makes it whole, whatever the layer. torch's own context parallelism shards the buffers that the user lists and
does not run on the CPU.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from shoal.comm.channel import Channel
from shoal.comm.mesh import Mesh
from shoal.comm.trafficcounter import TrafficCounts
from shoal.core.axes import Axis
from shoal.core.errors import Refusal, RequestError
from shoal.costs.blocks import stream_key
from shoal.models.transformer import Rotary
from shoal.parallel.analysis.structure import ModuleAnalysis, Stack
from shoal.parallel.context.intercept import Interception, Run
from shoal.parallel.context.positions import Positions, cut_arguments, gather_sequence
from shoal.parallel.context.traffic_forecast import GatherShape, ObservedShapes, forecast_traffic


@dataclass(frozen=True, kw_only=True)
class ContextLayout:
    """What the loss must know of a model that ``apply_context_parallel`` changed."""

    where: Positions
    keeps_local: bool
    """The model's output has this rank's positions only, and so must the targets. Otherwise it has all of them."""
    seen: ObservedShapes = field(default_factory=ObservedShapes)
    """Attentions that ran while the traffic counter was open; ``seen.forget()`` begins anew."""

    @property
    def loss_factor(self) -> float:
        """What each rank's loss is multiplied by, so that the sum over cp counts everything once."""
        return 1.0 if self.keeps_local else 1.0 / self.where.degree

    def positions(self, length: int) -> Tensor:
        """This rank's positions of a sequence, in the order in which the output has them.

        Raises:
            Refusal: the sequence cannot be dealt out evenly.
        """
        return self.where.select(length)

    def forecast_traffic(self, *, recomputes: bool) -> TrafficCounts:
        """What the forward passes in ``seen`` and their backward passes should have moved along ``cp``, without gradient sums."""
        return forecast_traffic(
            kind=self.where.kind,
            degree=self.where.degree,
            attentions=self.seen.attentions,
            gathers=self.seen.gathers,
            recomputes=recomputes,
        )


def apply_context_parallel(model: nn.Module, *, analysis: ModuleAnalysis, mesh: Mesh, kind: str) -> ContextLayout:
    """Make a model compute on this rank's positions inside its stacks, in place; parameters and their names stay.

    Apply it after tensor and sequence parallelism, whose hooks must see this rank's positions, and before recompute.

    Args:
        model: the module to change.
        analysis: its stacks; each one with a ``sequence_dim`` is cut, and the last may stay cut to the model's end.
        mesh: gives the ranks along ``cp``.
        kind: ``ring`` or ``alltoall``.

    Raises:
        RequestError: no stack has a sequence, or one mixes positions outside attention.
    """
    assert kind in ("ring", "alltoall"), kind
    channel = mesh.channel(Axis.CONTEXT)
    where = Positions(kind=kind, rank=channel.rank, degree=channel.size)
    stacks = [stack for stack in analysis.stacks if stack.sequence_dim is not None]
    _check_stacks(stacks, channel.size)
    active, seen = _Active(), ObservedShapes()
    heads = [attention.path for attention in analysis.attentions]
    for stack in stacks:
        keeps_local = stack is stacks[-1] and analysis.tail_is_pointwise
        _apply_to_stack(model, stack, _StackState(stack, where, channel, seen), heads, active, keeps_local)
    for module in model.modules():
        if isinstance(module, Rotary):
            module.positions = active.positions
        elif isinstance(module, nn.TransformerEncoder):
            # Its shortcut for evaluation packs a padded batch into a nested tensor, which has no sequence dim to cut.
            module.use_nested_tensor = False
    return ContextLayout(where=where, keeps_local=analysis.tail_is_pointwise, seen=seen)


def _check_stacks(stacks: Sequence[Stack], degree: int) -> None:
    if not stacks:
        raise RequestError(
            f"cp={degree} needs a stack of blocks with a sequence, and none was found; set cp=1, or say which blocks there are "
            "in [parallel]"
        )
    for stack in stacks:
        if not stack.is_pointwise:
            raise RequestError(
                f"cp={degree} cannot cut the sequence of {stack.blocks[0]!r} and its {len(stack.blocks) - 1} followers: they mix "
                "positions outside attention; set cp=1"
            )


class _Active:
    """Which run of a block is under way, for modules that count positions themselves."""

    def __init__(self) -> None:
        self.run: Run | None = None

    def positions(self, length: int) -> Tensor:
        """The positions of a tensor of ``length``: this rank's, if it has as many; else it is a whole other sequence."""
        if self.run is not None and length == self.run.local:
            return self.run.rows
        device = None if self.run is None else self.run.rows.device
        return torch.arange(length, device=device)


@dataclass
class _StackState:
    """One stack at work: lengths of the sequence that goes through it."""

    stack: Stack
    where: Positions
    channel: Channel
    seen: ObservedShapes
    whole: int = 0
    local: int = 0
    num_shards: int = 1
    """Ranks that share the local positions between split layers (sequence parallelism)."""
    is_fresh: bool = False
    """The stream was cut and no block has run yet."""
    rows: dict[tuple[int, torch.device], Tensor] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_StackState":
        # A process group cannot be copied, and a copy of a model talks to the same ranks.
        return self

    @property
    def dim(self) -> int:
        assert self.stack.sequence_dim is not None
        return self.stack.sequence_dim

    def rows_of(self, whole: int, device: torch.device) -> Tensor:
        """This rank's positions, computed once per length."""
        key = (whole, device)
        if key not in self.rows:
            self.rows[key] = self.where.select(whole, device)
        return self.rows[key]


def _apply_to_stack(
    model: nn.Module, stack: Stack, state: _StackState, heads: Sequence[str], active: _Active, keeps_local: bool
) -> None:
    for index, path in enumerate(stack.blocks):
        block = model.get_submodule(path)
        # The class's own, without self: other techniques have wrapped the object's by now.
        names = tuple(inspect.signature(type(block).forward).parameters)[1:]
        # First of all hooks: sequence parallelism cuts what is already this rank's.
        block.register_forward_pre_hook(
            functools.partial(_enter, state, path, names, index == 0), prepend=True, with_kwargs=True
        )
        attends = any(head == path or head.startswith(f"{path}.") for head in heads)
        # A partial of a bound method and not a closure, so that a copied model runs its own blocks.
        block.forward = functools.partial(_run_block, block.forward, block, path, state, active, attends)
    if not keeps_local:
        last = model.get_submodule(stack.blocks[-1])
        last.register_forward_hook(functools.partial(_leave, state))


def _enter(
    state: _StackState,
    path: str,
    names: Sequence[str],
    is_first: bool,
    block: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cut what a block is given: the stream before the first block, and whatever else runs along the sequence."""
    stream = _stream_of(args, kwargs, path)
    size = stream.size(state.dim)
    if is_first:
        state.whole, state.local = size, state.where.local_length(size)
        state.is_fresh = True
    elif size * state.num_shards != state.local:
        raise Refusal(
            f"cp={state.where.degree}: block {path!r} was given {size} positions, the block before it gave "
            f"{state.local // state.num_shards}; blocks of a stack must run one after another, or use cp=1"
        )
    return cut_arguments(
        args,
        kwargs,
        names=names,
        path=path,
        stream=stream,
        cuts_stream=is_first,
        sequence_dim=state.dim,
        whole=state.whole,
        where=state.where,
    )


def _leave(state: _StackState, block: nn.Module, args: Any, output: Any) -> Any:
    """Put the sequence together again after the last block of a stack."""
    stream = output if isinstance(output, Tensor) else output[0]
    assert isinstance(stream, Tensor), "a block gives its stream, alone or first"
    if state.channel.is_counting:
        trains = torch.is_grad_enabled() and stream.requires_grad
        state.seen.gathers.append(GatherShape(num_bytes=stream.nbytes * state.where.degree, trains=trains))
    gathered = gather_sequence(stream, state.dim, state.where, state.channel)
    return gathered if stream is output else (gathered, *output[1:])


# Outside compiled graphs: it waits for other processes, and the mode is Python.
@_disable_dynamo
def _run_block(
    forward: Callable[..., Any],
    block: nn.Module,
    path: str,
    state: _StackState,
    active: _Active,
    attends: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """A block's forward with attention over all ranks; what recompute runs again is this too."""
    stream = _stream_of(args, kwargs, path)
    if state.is_fresh:
        state.num_shards, state.is_fresh = state.local // stream.size(state.dim), False
    # From the stream itself, because a recomputed run may come after the stack has seen another length.
    local = stream.size(state.dim) * state.num_shards
    whole = local * state.where.degree
    run = Run(
        path=path,
        channel=state.channel,
        positions=state.where,
        whole=whole,
        local=local,
        rows=state.rows_of(whole, stream.device),
        seen=state.seen,
        arguments=[value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)],
        tables={id(tensor): name for name, tensor in (*block.named_buffers(), *block.named_parameters())},
    )
    before, active.run = active.run, run
    try:
        with Interception(run):
            output = forward(*args, **kwargs)
    finally:
        active.run = before
    if attends and run.num_attentions == 0:
        raise run.refuse(
            "has an attention that does not call F.scaled_dot_product_attention",
            "use that function (Hugging Face: attn_implementation='sdpa'), or cp=1",
        )
    return output


def _stream_of(args: Sequence[Any], kwargs: Mapping[str, Any], path: str) -> Tensor:
    key = stream_key(args, kwargs)
    if key is None:
        raise Refusal(f"cp: block {path!r} was given no tensor, so it has no stream to cut; use cp=1")
    stream = args[key] if isinstance(key, int) else kwargs[key]
    assert isinstance(stream, Tensor)
    return stream
