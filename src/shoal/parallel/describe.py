"""What was found in a module and what a plan does with it, in a few lines for people: stderr and ``--dry-run`` print them."""

import re
from collections.abc import Iterator, Mapping, Sequence

from shoal.core.axes import Axis
from shoal.core.plan import Plan
from shoal.parallel.analysis.structure import ModuleAnalysis, Split, SplitKind, Stack
from shoal.parallel.tensor.sequence import why_whole

_DONE = {
    SplitKind.COLUMN: "split along the output dim",
    SplitKind.ROW: "split along the reduction dim, then summed",
    SplitKind.VOCABULARY: "split along the vocabulary",
    SplitKind.LOGITS: "split along the vocabulary; the loss is computed from the parts",
}


def describe(analysis: ModuleAnalysis, plan: Plan) -> list[str]:
    """Short lines: blocks, what is split and how, what stays whole on every rank and why.

    Args:
        analysis: what was found.
        plan: what will run; a technique that it does not use is not described.
    """
    lines = [f"found {_stack_words(stack)}" for stack in analysis.stacks] or ["found no row of blocks of one kind"]
    if "" in analysis.replicated:
        lines.append(analysis.replicated[""])
    if plan.tp > 1:
        lines += _tensor_lines(analysis, plan)
    if plan.sp:
        for stack in analysis.stacks:
            reason = why_whole(analysis, stack)
            done = (
                f"each rank has 1/{plan.tp} of the positions"
                if reason is None
                else f"the sequence stays whole: {reason}"
            )
            lines.append(f"sp: between the split layers of {shorten(stack.blocks)} {done}")
    if plan.cp > 1:
        tail = "each rank scores its own positions" if analysis.tail_is_pointwise else "then the sequence is gathered"
        lines.append(f"cp: attention crosses {plan.cp} ranks by {plan.cp_kind}; after the last block {tail}")
    if plan.zero:
        what = ("optimizer state", "optimizer state and gradients", "optimizer state, gradients and weights")[
            plan.zero - 1
        ]
        lines.append(f"zero={plan.zero}: each of the {plan.degree(Axis.DATA)} dp ranks keeps its share of {what}")
    if plan.recompute != "none":
        kept = "" if plan.recompute == "full" else ", but for its matrix products and attention"
        lines.append(f"recompute={plan.recompute}: each block runs again in the backward pass{kept}")
    return lines


def shorten(paths: Sequence[str]) -> str:
    """Paths that differ in their numbers only, as one: ``blocks.0-3.attention.query``; others after a comma."""
    families: dict[str, list[tuple[int, ...]]] = {}
    for path in paths:
        numbers = tuple(int(number) for number in re.findall(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", path))
        families.setdefault(re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "#", path), []).append(numbers)
    return ", ".join(_fill(pattern, numbers) for pattern, numbers in families.items())


def _fill(pattern: str, numbers: list[tuple[int, ...]]) -> str:
    for values in zip(*numbers, strict=True):
        pattern = pattern.replace("#", _span(sorted(set(values))), 1)
    return pattern


def _span(numbers: list[int]) -> str:
    if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return "+".join(map(str, numbers))


def _stack_words(stack: Stack) -> str:
    count = len(stack.blocks)
    where = "" if stack.sequence_dim is None else f", sequence in dim {stack.sequence_dim}"
    return f"{count} block{'s' if count > 1 else ''} {shorten(stack.blocks)}{where}"


def _tensor_lines(analysis: ModuleAnalysis, plan: Plan) -> Iterator[str]:
    if not analysis.splits and not analysis.attentions:
        yield "tp: found nothing to split"
    for (kind, parts), paths in _by_kind(analysis.splits).items():
        fused = f", each of its {parts} parts by itself" if parts > 1 else ""
        yield f"tp: {shorten(paths)}: {_DONE[kind]}{fused}"
    whole = [heads.path for heads in analysis.attentions if heads.is_torch]
    if whole:
        yield f"tp: {shorten(whole)}: split by heads"
    for heads, kv_heads in dict.fromkeys((heads.num_heads, heads.num_kv_heads) for heads in analysis.attentions):
        shared = "" if heads == kv_heads else f" and {kv_heads // plan.tp} of {kv_heads} key-value heads"
        yield f"tp: each rank has {heads // plan.tp} of {heads} heads{shared}"
    for reason, paths in _by_reason(analysis.replicated).items():
        yield f"whole on every tp rank: {shorten(paths)}: {reason}"


def _by_kind(splits: Sequence[Split]) -> dict[tuple[SplitKind, int], list[str]]:
    found: dict[tuple[SplitKind, int], list[str]] = {}
    for split in splits:
        found.setdefault((split.kind, split.parts), []).append(split.path)
    return found


def _by_reason(replicated: Mapping[str, str]) -> dict[str, list[str]]:
    """Reasons and the paths they hold for; reasons that differ in a block's number only are one."""
    found: dict[str, list[str]] = {}
    firsts: dict[str, str] = {}
    for path, reason in replicated.items():
        if path:
            first = firsts.setdefault(re.sub(r"\.\d+", ".#", reason), reason)
            found.setdefault(first, []).append(path)
    return found
