"""Finds in any ``nn.Module`` what techniques act on: blocks, pairs of linear layers, attention heads, vocabularies.

``parallelize_module`` of torch wants a table of layers and styles from the user; here the table is read off the record of one
forward pass on an example, and the recipe's ``[parallel]`` section corrects it. Nothing is guessed from names: a layer is split
only when the trace showed that its features stay apart until a partner sums them up. Deterministic: the same module and shapes
give the same answer on every rank.

A stack is what is sharded, recomputed and cut along the sequence block by block: children of one class, side by side in a list
or numbered, that run once each, in order, each on the output of the one before. Experts that all read the same input are of one
class too, and are no stack: the trace tells them apart.
"""

from collections.abc import Iterator
from itertools import pairwise

from torch import Tensor, nn

from shoal.costs.blocks import is_under, sibling_blocks
from shoal.costs.tracer import TensorInfo
from shoal.parallel.analysis.groups import Group
from shoal.parallel.analysis.override import apply_split_table, match_blocks
from shoal.parallel.analysis.probe import is_stack_pointwise, is_tail_pointwise
from shoal.parallel.analysis.structure import Heads, ModuleAnalysis, ParallelConfig, Split, SplitKind, Stack
from shoal.parallel.analysis.trace import BlockCall, Trace, find_outside_reads, is_linear, trace_forward
from shoal.parallel.analysis.vocabulary import find_vocabulary, shared_parameters

_CONVOLUTIONS = (nn.modules.conv._ConvNd,)
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)


def analyse_module(model: nn.Module, example: tuple[Tensor, ...] | None, config: ParallelConfig) -> ModuleAnalysis:
    """What a module is made of.

    Args:
        model: the plain module, on the CPU, before any technique changed it.
        example: its inputs for a few samples; two are enough. None finds only what the structure shows.
        config: the recipe's corrections.

    Raises:
        RequestError: a correction matches nothing, or contradicts what the layers are.
    """
    trace, note = _try_trace(model, example)
    stacks = _stacks(model, trace, config)
    groups = _accept_groups(model, trace) if trace is not None else []
    splits = {split.path: split for group in groups for split in _group_splits(group)}
    reasons: dict[str, str] = {}
    if trace is not None:
        found, reasons = find_vocabulary(model, trace, stacks)
        splits |= {split.path: split for split in found if split.path not in splits}
    attentions = [heads for group in groups for heads in _group_heads(model, group)]
    attentions += _torch_heads(model, trace)
    splits, dropped = apply_split_table(
        model,
        splits,
        config,
        pairings=[(group.producers, group.rows) for group in groups],
        traced=[] if trace is None else [(group.producers, group.rows) for group in trace.follower.groups.roots()],
    )
    kept = [group for group in groups if all(path in splits for path in group.producers + group.rows)]
    lost = {seen.path for group in groups if group not in kept for seen in group.attentions}
    order = {path: place for place, (path, _) in enumerate(model.named_modules())}
    attentions = [heads for heads in attentions if heads.path not in lost and heads.path not in dropped]
    reasons |= dropped
    return ModuleAnalysis(
        stacks=stacks,
        splits=tuple(sorted(splits.values(), key=lambda split: order[split.path])),
        attentions=tuple(sorted(attentions, key=lambda heads: order[heads.path])),
        attends=tuple(sorted(_attending(trace))),
        split_dropouts={path: dim for group in kept for path, dim in group.dropouts.items()},
        dropout_calls={} if trace is None else _mixed_calls(trace, kept),
        read_outside=find_outside_reads(model, example, [block for stack in stacks for block in stack.blocks])
        if trace is not None and example is not None
        else frozenset(),
        tied=tuple(shared_parameters(model)),
        sequence=_sequence(stacks, trace),
        tail_is_pointwise=_is_tail_pointwise(model, stacks, trace),
        replicated=dict(_replicated(model, trace, splits, {heads.path for heads in attentions}, reasons, note)),
    )


def _try_trace(model: nn.Module, example: tuple[Tensor, ...] | None) -> tuple[Trace | None, str]:
    if example is None:
        return None, "no example input was given, so the forward pass was not traced"
    try:
        return trace_forward(model, example), ""
    # The user's forward pass may raise anything on an input that it did not expect; that is no reason to refuse data parallelism.
    except Exception as error:
        return None, f"the forward pass could not be traced ({type(error).__name__}: {error})"


def _stacks(model: nn.Module, trace: Trace | None, config: ParallelConfig) -> tuple[Stack, ...]:
    named = match_blocks(model, config.blocks)
    if not named:
        return find_stacks(model, trace)
    if trace is None:
        return tuple(Stack(blocks=blocks, is_pointwise=False) for blocks in named)
    return tuple(describe_stack(model, blocks, trace) for blocks in named)


def _mixed_calls(trace: Trace, kept: list[Group]) -> dict[str, tuple[bool, ...]]:
    """Modules that drop split features in some calls and whole tensors in others, as one that both ends of an MLP share."""
    groups, paths = trace.follower.groups, {path for group in kept for path in group.dropouts}
    calls = {
        path: tuple(
            number is not None and any(groups[groups.root(number)] is group for group in kept) for number in found
        )
        for path, found in trace.follower.dropped.items()
        if path in paths
    }
    return {path: found for path, found in calls.items() if not all(found)}


def _accept_groups(model: nn.Module, trace: Trace) -> list[Group]:
    """The groups to split, in the order of execution; a layer belongs to the first group that can have it.

    In a chain of linear layers every neighbouring two could be a pair; taken greedily they alternate: column, row, column, row.
    """
    follower = trace.follower
    accepted: list[Group] = []
    taken: set[str] = set()
    shared = {name.rpartition(".")[0] for names in shared_parameters(model) for name in names}
    for group in sorted(follower.groups.roots(), key=lambda group: follower.order.index(group.producers[0])):
        layers = [*group.producers, *group.rows]
        for path in layers:
            if path in follower.used_outside:
                group.block(f"something besides {path} itself uses its weight")
            if path in shared:
                group.block(f"the weight of {path} is another layer's too")
            if path in group.rows and path in follower.plain_inputs:
                group.block(f"{path} is also called on a tensor that every rank holds whole")
        if set(group.producers) & set(group.rows):
            group.block(f"{group.producers[0]} feeds itself")
        group.settle(follower.kept_whole, follower.values)
        if group.obstacle is None and taken & set(layers):
            group.block("a neighbour is one of another pair")
        if group.obstacle is None:
            accepted.append(group)
            taken |= set(layers)
    return accepted


def _group_splits(group: Group) -> Iterator[Split]:
    for path in group.producers:
        yield Split(path=path, kind=SplitKind.COLUMN, parts=next(iter(group.parts.get(path, {1}))))
    for path in group.rows:
        yield Split(path=path, kind=SplitKind.ROW)


def _group_heads(model: nn.Module, group: Group) -> Iterator[Heads]:
    for path in dict.fromkeys(seen.path for seen in group.attentions):
        calls = [seen for seen in group.attentions if seen.path == path]
        module = model.get_submodule(path)
        yield Heads(
            path=path,
            num_heads=max(seen.num_heads for seen in calls),
            num_kv_heads=min(seen.num_kv_heads for seen in calls),
            divided={name: int(getattr(module, name)) for name in group.divided.get(path, {})},
            dropout=max(seen.dropout for seen in calls),
        )


def _torch_heads(model: nn.Module, trace: Trace | None) -> list[Heads]:
    """torch's own attention modules, each split as a piece; those of unequal widths are left whole."""
    left_whole = trace.follower.used_outside | trace.learned_masks if trace is not None else set()
    return [
        Heads(
            path=path,
            num_heads=module.num_heads,
            num_kv_heads=module.num_heads,
            dropout=module.dropout,
            is_torch=True,
        )
        for path, module in model.named_modules()
        if type(module) is nn.MultiheadAttention
        and module._qkv_same_embed_dim
        and module.bias_k is None
        and not module.add_zero_attn
        and path not in left_whole
    ]


def _attending(trace: Trace | None) -> set[str]:
    if trace is None:
        return set()
    return {path for path, _ in trace.follower.lengths} | set(trace.torch_attentions)


def _sequence(stacks: tuple[Stack, ...], trace: Trace | None) -> int | None:
    """The length of the stream whose positions are scored: that of the last stack that has one."""
    for stack in reversed(stacks):
        if trace is not None and stack.sequence_dim is not None:
            call = next(call for call in trace.calls if call.path == stack.blocks[0])
            assert call.read is not None
            return int(call.read.shape[stack.sequence_dim])
    return None


def _is_tail_pointwise(model: nn.Module, stacks: tuple[Stack, ...], trace: Trace | None) -> bool:
    if trace is None or not stacks or stacks[-1].sequence_dim is None:
        return False
    return is_tail_pointwise(model, trace.example, last=stacks[-1].blocks[-1], dim=stacks[-1].sequence_dim)


def _replicated(
    model: nn.Module,
    trace: Trace | None,
    splits: dict[str, Split],
    attended: set[str],
    reasons: dict[str, str],
    note: str,
) -> Iterator[tuple[str, str]]:
    if note:
        yield "", note
    pieces = [path for path in attended if type(model.get_submodule(path)) is nn.MultiheadAttention]
    cut = {id(parameter) for path in splits for parameter in model.get_submodule(path).parameters()}
    for path, module in model.named_modules():
        # A parent may hold a split layer's bias under a second name, as BERT's output layer does.
        has_weights = any(id(parameter) not in cut for parameter in module.parameters(recurse=False))
        if has_weights and not any(is_under(path, piece) for piece in pieces):
            yield path, reasons.get(path) or _reason(path, module, trace)


def _reason(path: str, module: nn.Module, trace: Trace | None) -> str:
    if isinstance(module, _NORMS) or type(module).__name__.endswith("Norm"):
        return "a norm: small, and it needs all features"
    if isinstance(module, _CONVOLUTIONS):
        return "convolutions are not split"
    if isinstance(module, nn.MultiheadAttention):
        if trace is not None and path in trace.learned_masks:
            return "its mask is learned, and every head adds to the mask's gradient"
        return "its query, key and value widths differ, or it adds keys of its own"
    if is_linear(module) and trace is not None:
        number = trace.follower.groups.by_producer.get(path)
        if number is None:
            return "it did not run in the traced pass"
        obstacle = trace.follower.groups[number].obstacle
        return obstacle or "no partner sums its features up"
    return f"no rule splits a {type(module).__name__}"


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
    return all(one.output is not None and two.read == one.output for one, two in pairwise(calls))


def _fits(one: BlockCall, two: BlockCall) -> bool:
    """True when something light may lie between two blocks; False when both read the same, as experts do."""
    if one.output is None or two.read is None:
        return False
    return two.read != one.read and two.read.shape == one.output.shape


def _sequence_dim(model: nn.Module, calls: list[BlockCall], trace: Trace) -> int | None:
    stream, output = calls[0].read, calls[-1].output
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
