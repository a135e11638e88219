"""What a plan needs of any module: the rules of ``core/planrules.py``, fed with what was found in it.

Importing this file teaches ``Plan.check`` to read a ``ModuleAnalysis`` or an ``nn.Module``.
"""

from collections.abc import Iterator

from torch import nn

from shoal.core.facts import ModelFacts, Width, model_facts
from shoal.costs.blocks import is_under
from shoal.parallel.analysis.analyse import analyse_module
from shoal.parallel.analysis.structure import ModuleAnalysis, ParallelConfig, SplitKind, Stack
from shoal.parallel.analysis.trace import linear_sizes
from shoal.parallel.tensor.sequence import is_cut, why_whole


def describe_facts(
    analysis: ModuleAnalysis, model: nn.Module | None = None, *, sequence: int | None = None
) -> ModelFacts:
    """The numbers that the rules ask for.

    Args:
        analysis: what was found.
        model: the module it was found in; widths and batch norms are known only with it.
        sequence: length of the sequence that will be trained on; that of the traced example when left out.
    """
    with_sequence = [stack for stack in analysis.stacks if stack.sequence_dim is not None]
    blocks = [block for stack in with_sequence for block in stack.blocks]
    paths = {*analysis.attends, *(heads.path for heads in analysis.attentions)}
    attended = [path for path in paths if any(is_under(path, block) for block in blocks)]
    num_rows = sum(split.kind is SplitKind.ROW for split in analysis.splits)
    return ModelFacts(
        name="the model" if model is None else type(model).__name__,
        num_blocks=sum(len(stack.blocks) for stack in analysis.stacks),
        num_pairs=num_rows + sum(heads.is_torch for heads in analysis.attentions),
        widths=() if model is None else tuple(_widths(model, analysis)),
        heads=tuple(dict.fromkeys((heads.num_heads, heads.num_kv_heads) for heads in analysis.attentions)),
        has_attention=bool(attended),
        sequence=sequence if sequence is not None else analysis.sequence,
        has_sequence=bool(with_sequence),
        obstacle_sp="" if any(is_cut(analysis, stack) for stack in with_sequence) else _first_obstacle(analysis),
        obstacle_cp=next((_mixes(stack) for stack in with_sequence if not stack.is_pointwise), ""),
        attention_dropout=max((heads.dropout for heads in analysis.attentions), default=0.0),
        has_batch_norm=model is not None and has_batch_norm(model),
        keeps_statistics=model is not None and _keeps_statistics(model),
        note=analysis.replicated.get("", ""),
    )


def _mixes(stack: Stack) -> str:
    return (
        f"{stack.blocks[0]} mixes positions outside F.scaled_dot_product_attention "
        f"(Hugging Face: attn_implementation='sdpa')"
    )


def _first_obstacle(analysis: ModuleAnalysis) -> str:
    reasons = (why_whole(analysis, stack) for stack in analysis.stacks if stack.sequence_dim is not None)
    return next((reason for reason in reasons if reason is not None), "")


def has_batch_norm(model: nn.Module) -> bool:
    """True when statistics over the batch are part of the forward pass."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def _keeps_statistics(model: nn.Module) -> bool:
    norms = (module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm))
    return any(norm.track_running_stats for norm in norms)


def _widths(model: nn.Module, analysis: ModuleAnalysis) -> Iterator[Width]:
    """Features that are counted one by one, each number once; those that are counted in heads are not asked about twice."""
    seen = set()
    headed = {heads.path for heads in analysis.attentions}
    for split in analysis.splits:
        is_headed = any(is_under(split.path, path) for path in headed)
        if split.kind is SplitKind.COLUMN and not is_headed:
            size = linear_sizes(model.get_submodule(split.path))[1] // split.parts
            if size not in seen:
                seen.add(size)
                yield Width(name=split.path, size=size)


@model_facts.register
def _(model: ModuleAnalysis) -> ModelFacts:
    return describe_facts(model)


@model_facts.register
def _(model: nn.Module) -> ModelFacts | None:
    # Without an example only structure can be seen, and what cannot be seen must not be refused: a trainer that knows its data
    # checks the analysis of a traced pass.
    facts = describe_facts(analyse_module(model, None, ParallelConfig()), model)
    if facts.num_pairs == 0:
        return None
    return ModelFacts(
        name=facts.name, num_blocks=max(1, facts.num_blocks), num_pairs=facts.num_pairs, heads=facts.heads
    )
