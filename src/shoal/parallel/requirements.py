"""What a plan needs of any module: the rules of ``core/combine.py``, fed with what was found in it.

Importing this file teaches ``Plan.check`` to read a ``ModuleAnalysis`` or an ``nn.Module``. Run as
``python -m shoal.parallel.requirements docs/guides/parallelism.md`` it writes the table of combinations into that page, from
the same rules.
"""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from shoal.core.errors import RequestError
from shoal.core.facts import ModelFacts, Width, model_facts
from shoal.core.plan import Plan
from shoal.costs.blocks import is_under
from shoal.parallel.analysis.analyse import analyse_module
from shoal.parallel.analysis.structure import ModuleAnalysis, ParallelConfig, SplitKind, Stack
from shoal.parallel.analysis.trace import linear_sizes
from shoal.parallel.tensor.sequence import is_cut, why_whole

TABLE_START = (
    "<!-- combinations: written by `python -m shoal.parallel.requirements docs/guides/parallelism.md`, do not edit -->"
)
TABLE_END = "<!-- end of combinations -->"


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


_TECHNIQUES: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2},
    "zero=1": {"dp": 2, "zero": 1},
    "zero=2": {"dp": 2, "zero": 2},
    "zero=3": {"dp": 2, "zero": 3},
    "tp": {"tp": 2},
    "sp": {"tp": 2, "sp": True},
    "cp ring": {"cp": 2},
    "cp alltoall": {"cp": 2, "cp_kind": "alltoall"},
    "pp": {"pp": 2, "schedule": "1f1b"},
    "pp, pipedream": {"pp": 2, "schedule": "pipedream"},
    "recompute=selective": {"recompute": "selective"},
    "recompute=full": {"recompute": "full"},
}
_MODELS = {
    "transformer": ModelFacts(
        name="the transformer",
        num_blocks=4,
        num_pairs=8,
        heads=((8, 4),),
        has_attention=True,
        sequence=64,
        has_sequence=True,
    ),
    "transformer with attention dropout": ModelFacts(
        name="the transformer",
        num_blocks=4,
        num_pairs=8,
        heads=((8, 4),),
        has_attention=True,
        sequence=64,
        has_sequence=True,
        attention_dropout=0.1,
    ),
    "mlp": ModelFacts(name="the mlp", num_blocks=2, num_pairs=1, widths=(Width(name="hidden", size=64),)),
    "cnn": ModelFacts(
        name="the cnn",
        num_pairs=1,
        widths=(Width(name="hidden", size=64),),
        has_batch_norm=True,
        keeps_statistics=True,
    ),
}


def combination_table() -> str:
    """The table of combinations as Markdown: techniques with each other on a transformer, then each on other models."""
    names = list(_TECHNIQUES)
    lines = ["| with | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    refused: dict[str, int] = {}
    for row in names:
        cells = [_cell({**_TECHNIQUES[row], **_TECHNIQUES[column]}, row, column, refused) for column in names]
        lines.append(f"| **{row}** | " + " | ".join(cells) + " |")
    lines += ["", "| model | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for model, facts in _MODELS.items():
        cells = [_verdict(Plan(**{"dp": 1, **_TECHNIQUES[name]}), facts, refused) for name in names]
        lines.append(f"| {model} | " + " | ".join(cells) + " |")
    notes = [f"{number}. {reason}" for reason, number in refused.items()]
    return "\n".join([*lines, "", *notes])


def _cell(keys: dict[str, Any], row: str, column: str, refused: dict[str, int]) -> str:
    clashes = [
        key
        for key in _TECHNIQUES[row].keys() & _TECHNIQUES[column].keys()
        if _TECHNIQUES[row][key] != _TECHNIQUES[column][key] and key != "dp"
    ]
    # One key has one value: zero=1 and zero=2 are not two techniques but a choice. Stage 3 includes stage 1.
    is_choice = bool(clashes) or (row != column and row.startswith("cp") and column.startswith("cp"))
    if is_choice:
        return "one of them"
    return _verdict(Plan(**{"dp": 1, **keys}), _MODELS["transformer"], refused)


def _verdict(plan: Plan, facts: ModelFacts, refused: dict[str, int]) -> str:
    problems = plan.problems(facts)
    if not problems:
        return "yes"
    reasons = [problem.partition(";")[0] for problem in problems]
    return "no " + ", ".join(f"[{refused.setdefault(reason, len(refused) + 1)}]" for reason in reasons)


def write_table(page: Path) -> None:
    """Put the table between its two marks in a page.

    Raises:
        RequestError: the page has no marks.
    """
    text = page.read_text()
    if TABLE_START not in text or TABLE_END not in text:
        raise RequestError(f"{page} has no lines {TABLE_START!r} and {TABLE_END!r}; put them where the table goes")
    head, _, rest = text.partition(TABLE_START)
    page.write_text(f"{head}{TABLE_START}\n\n{combination_table()}\n\n{TABLE_END}{rest.partition(TABLE_END)[2]}")


if __name__ == "__main__":
    for argument in itertools.islice(sys.argv, 1, None):
        write_table(Path(argument))
