"""Rows of blocks of one kind in any module: what is sharded, recomputed and cut along the sequence as a unit.

A row is children of one class, side by side in a list or numbered, that run once each, in order, each on what the one before put
out. Experts that all read the same input are of one class too, and are no row: the trace tells them apart.
"""

from itertools import pairwise

from torch import nn

from shoal.costs.blocks import is_under, sibling_blocks
from shoal.costs.tracer import TensorInfo
from shoal.parallel.analysis.probe import is_stack_pointwise
from shoal.parallel.analysis.structure import Stack
from shoal.parallel.analysis.trace import BlockCall, Trace


def find_stacks(model: nn.Module, trace: Trace | None) -> tuple[Stack, ...]:
    """The stacks of a model in the order in which they run; in the order of modules where nothing was traced."""
    runs: list[tuple[str, ...]] = []
    for path, module in model.named_modules():
        if not any(is_under(path, block) for run in runs for block in run):
            runs += [run for run in sibling_blocks(path, module) if _is_row(run, trace)]
    if trace is None:
        return tuple(Stack(blocks=run, is_pointwise=False) for run in runs)
    first_call = {call.path: place for place, call in reversed(list(enumerate(trace.calls)))}
    return tuple(describe_stack(model, run, trace) for run in sorted(runs, key=lambda run: first_call[run[0]]))


def describe_stack(model: nn.Module, blocks: tuple[str, ...], trace: Trace) -> Stack:
    """A row of blocks and where the sequence is in its stream."""
    calls = [call for call in trace.calls if call.path in blocks]
    if [call.path for call in calls] != list(blocks) or not _is_chained(calls):
        return Stack(blocks=blocks, is_pointwise=False)
    dim = _sequence_dim(model, calls, trace)
    if dim is None:
        return Stack(blocks=blocks, is_pointwise=False)
    is_pointwise = is_stack_pointwise(model, trace.example, first=blocks[0], last=blocks[-1], dim=dim)
    return Stack(blocks=blocks, sequence_dim=dim, is_pointwise=is_pointwise)


def _is_row(blocks: tuple[str, ...], trace: Trace | None) -> bool:
    if trace is None:
        return len(blocks) > 1
    calls = [call for call in trace.calls if call.path in blocks]
    if [call.path for call in calls] != list(blocks):
        return False
    return _is_chained(calls) or all(_fits(one, two) for one, two in pairwise(calls))


def _is_chained(calls: list[BlockCall]) -> bool:
    return all(one.put_out is not None and two.read == one.put_out for one, two in pairwise(calls))


def _fits(one: BlockCall, two: BlockCall) -> bool:
    """True when something light may lie between two blocks; False when both read the same, as experts do."""
    if one.put_out is None or two.read is None:
        return False
    return two.read != one.read and two.read.shape == one.put_out.shape


def _sequence_dim(model: nn.Module, calls: list[BlockCall], trace: Trace) -> int | None:
    stream, output = calls[0].read, calls[-1].put_out
    if stream is None or output is None or stream.ndim != 3 or stream.shape != output.shape:
        return None
    for path in trace.torch_attentions:
        attention = model.get_submodule(path)
        if is_under(path, calls[0].path) and isinstance(attention, nn.MultiheadAttention):
            return 1 if attention.batch_first else 0
    lengths = [length for path, length in trace.follower.lengths if is_under(path, calls[0].path)]
    if lengths:
        dims = [dim for dim in (1, 0) if stream.shape[dim] == lengths[0]]
        return dims[0] if dims else None
    return 1 if any(_leads(tensor, stream) for tensor in trace.inputs) else None


def _leads(tensor: TensorInfo, stream: TensorInfo) -> bool:
    """True for an input whose samples and positions are the stream's."""
    return tensor.ndim in (2, 3) and tensor.shape[:2] == stream.shape[:2]
