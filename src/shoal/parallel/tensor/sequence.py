"""Sequence parallelism: between the split layers each tensor-parallel rank keeps its own slice of the sequence.

Norms, dropouts and residuals of a stack of blocks work on L / tp positions; column layers gather the sequence, row layers sum
and scatter it, so the traffic is that of tensor parallelism alone and the rest of the block is neither computed nor kept tp times
over (Korthikanti et al., arXiv 2205.05198, section 4.2.2)::

    whole stream -> slice | norm -> gather -> column .. row -> reduce_scatter -> dropout, add | ... | gather -> whole stream
                    first block                                                              last block

A stack's entry and exit are hooks, outside of recompute, so they are not run again. What must hold in a recomputed forward too
(the gather before an attention, the memory of which tensors are whole) wraps ``forward`` inside it.

Not every tensor in a block is cut. What a block is given beside its stream (an encoder's output, masks, rotary tables) stays
whole, and a column layer tells such an input by its identity. What can be neither the stream nor a block's own argument is
refused.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from shoal.comm.channel import Channel
from shoal.core.errors import Refusal
from shoal.costs.blocks import replace_stream, stream_key
from shoal.parallel.analysis.structure import ModuleAnalysis, SplitKind, Stack
from shoal.parallel.tensor.crossing import enter_sequence, leave_sequence


def is_cut(analysis: ModuleAnalysis, stack: Stack) -> bool:
    """True when sequence parallelism cuts the sequence of this stack; ``why_whole`` says why not."""
    return why_whole(analysis, stack) is None


def why_whole(analysis: ModuleAnalysis, stack: Stack) -> str | None:
    """Why a stack keeps its whole sequence under sequence parallelism; None when it is cut."""
    if stack.sequence_dim is None:
        return "its blocks have no sequence"
    if not stack.is_pointwise:
        return "its blocks mix positions outside of attention"
    inline = {parent_of(path) for path in attention_columns(analysis)} & set(stack.blocks)
    if inline:
        # Such a block reads its input's shape before it makes heads of the projections, and they have another length.
        return f"block {min(inline)!r} computes attention in its own forward, not in a module of its own"
    split = {heads.path for heads in analysis.attentions}
    inside = tuple(f"{path}." for path in stack.blocks)
    whole = [path for path in analysis.attends if f"{path}.".startswith(inside) and path not in split]
    if whole:
        # The sequence is gathered where split layers begin, and here none does: each rank would attend to its own positions.
        return f"attention {min(whole)!r} is not split, and what is not split sees one rank's positions only"
    return None


def attention_columns(analysis: ModuleAnalysis) -> frozenset[str]:
    """Paths of the column layers that feed an attention."""
    homes = tuple(f"{heads.path}." for heads in analysis.attentions if not heads.is_torch)
    columns = (split.path for split in analysis.splits if split.kind is SplitKind.COLUMN)
    return frozenset(path for path in columns if path.startswith(homes)) if homes else frozenset()


def parent_of(path: str) -> str:
    """The path of the module that a module lies in."""
    return path.rpartition(".")[0]


class Region:
    """One stack whose sequence is cut: which dim it is, how long it is now, and which tensors in it are whole."""

    def __init__(self, *, dim: int, channel: Channel) -> None:
        self.dim = dim
        self.channel = channel
        self.whole_length = 0
        self._given: tuple[Tensor, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Region":
        # A process group cannot be copied, and a copy of a model talks to the same ranks.
        return self

    @property
    def local_length(self) -> int:
        """Positions that each rank keeps."""
        return self.whole_length // self.channel.size

    def is_whole(self, x: Tensor) -> bool:
        """True for a tensor that the running block was given beside its stream."""
        return any(x is given for given in self._given)

    def is_local(self, x: Tensor) -> bool:
        """True for a tensor that has the length of the cut stream."""
        return x.ndim > self.dim and x.shape[self.dim] == self.local_length

    def enter(self, x: Tensor) -> Tensor:
        """This rank's slice of the stream.

        Raises:
            Refusal: the ranks do not divide its length.
        """
        degree, length = self.channel.size, x.shape[self.dim]
        if length % degree:
            below = length - length % degree
            lengths = f"{below} or {below + degree}" if below else str(degree)
            raise Refusal(
                f"a sequence of {length} cannot be cut into tp={degree} equal slices, as sp=true needs; "
                f"use a sequence of {lengths}, or leave sp out"
            )
        self.whole_length = length
        return enter_sequence(x, self.channel, self.dim)

    def leave(self, x: Tensor) -> Tensor:
        """The whole stream again."""
        return leave_sequence(x, self.channel, self.dim)

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A block's forward, which remembers what it was given beside its stream for as long as it runs."""
        key = check_stream(args, kwargs)
        stream = args[key] if isinstance(key, int) else kwargs[key]
        # Said again, because a recomputed run, or one of another pipeline stage, may come after another length.
        self.whole_length = stream.shape[self.dim] * self.channel.size
        beside = [value for number, value in enumerate(args) if number != key]
        beside += [value for name, value in kwargs.items() if name != key]
        self._given = tuple(value for value in beside if isinstance(value, Tensor))
        try:
            return forward(*args, **kwargs)
        finally:
            self._given = ()


def apply_sequence_parallel(
    model: nn.Module, *, analysis: ModuleAnalysis, channel: Channel
) -> tuple[dict[str, Region], list[str]]:
    """Cut the sequence of every stack that allows it: hooks at its ends.

    The layers inside must then gather and scatter: ``apply.py`` gives them the region of their block.

    Returns:
        The region of each block by path, and what was left whole and why.
    """
    regions: dict[str, Region] = {}
    notes = []
    for stack in analysis.stacks:
        reason = why_whole(analysis, stack)
        if reason is not None:
            notes.append(f"the sequence of {stack.blocks[0]} to {stack.blocks[-1]} stays whole: {reason}")
            continue
        assert stack.sequence_dim is not None
        region = Region(dim=stack.sequence_dim, channel=channel)
        blocks = [model.get_submodule(path) for path in stack.blocks]
        blocks[0].register_forward_pre_hook(functools.partial(_enter, region), with_kwargs=True)
        blocks[-1].register_forward_hook(functools.partial(_leave, region))
        for path, block in zip(stack.blocks, blocks, strict=True):
            block.forward = functools.partial(region.run, block.forward)
            regions[path] = region
    return regions, notes


def find_region(regions: Mapping[str, Region], path: str) -> Region | None:
    """The region of the block that a module lies in."""
    while path:
        if path in regions:
            return regions[path]
        path = parent_of(path)
    return None


def check_stream(args: tuple[Any, ...], kwargs: Mapping[str, Any], kind: type = Tensor) -> int | str:
    """Where a call, or the record of one, has its stream.

    Raises:
        Refusal: it is neither the first argument nor the one named ``hidden_states``.
    """
    key = stream_key(args, kwargs, kind)
    if key not in (0, "hidden_states"):
        raise Refusal(
            "sp=true cuts the first argument of a block, or the one named hidden_states, and neither is a tensor; leave sp out"
        )
    return key


def _enter(
    region: Region, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    check_stream(args, kwargs)
    return replace_stream(args, kwargs, region.enter)


def _leave(region: Region, _: nn.Module, args: Any, output: Any) -> Any:
    if isinstance(output, Tensor):
        return region.leave(output)
    return type(output)((region.leave(output[0]), *output[1:]))
