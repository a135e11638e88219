"""What a row says of how its software was used: options that change what it does, in the words that tables have for them.

``software.py`` has what a software does by default; ``as_used`` gives it as one run used it. An option that a row does not name
is taken to be as the software has it by itself. No script fits any of this, and none of it depends on who published the row.
"""

import re
from collections.abc import Callable
from dataclasses import replace

from shoal.planner.hardware.software import Software

_HIDDEN_BY_PARTS = 0.3
"""Of tensor-parallel communication, what torchtitan's products that are cut into parts hide: its makers gained 8% of a step of
Llama 3 8B and 70B by it (discuss.pytorch.org, topic 209487), of which that communication is a fifth to a quarter by this planner.
So 0.3 to 0.4; by hand, the one that suits the one row of the calibration table that has it."""
_OF_HEADS = re.compile(
    r"ulysses|\bcp_comm_type\W{0,3}a2a|\bcp\b(?:(?!\bep\b|moe|expert|dispatch|ring)[^;,.]){0,20}\b(?:a2a|all-?to-?all)"
    r"|\b(?:a2a|all-?to-?all) (?:for )?cp\b",
    re.IGNORECASE,
)
_NOT_BEFORE = re.compile(r"\b(?:no|not|non|without|disabled?)[ -](?:\w+[.])?$", re.IGNORECASE)
_NOT_AFTER = re.compile(r"\s*(?:[=:]\s*(?:false|0|no|off)\b|\(?(?:is )?(?:off|disabled)\b)", re.IGNORECASE)


def _says(words: str, text: str) -> re.Match[str] | None:
    """Where a text says that something is so; not where it says that it is not."""
    for found in re.finditer(words, text, re.IGNORECASE):
        if not _NOT_BEFORE.search(text[: found.start()]) and not _NOT_AFTER.match(text[found.end() :]):
            return found
    return None


def _without_overlap(used: Software, _: re.Match[str]) -> Software:
    return replace(
        used,
        overlaps_reduce=False,
        overlaps_gather=False,
        overlaps_transfer=False,
        overlaps_tensor=0.0,
        overlaps_exchange=False,
    )


def _reduced_by(used: Software, found: re.Match[str]) -> Software:
    """Megatron's two wrappers: torch's own reduces while it goes backward, the local one afterwards (its arguments.py)."""
    return replace(used, overlaps_reduce=found[1].lower() == "torch")


def _in_groups(used: Software, found: re.Match[str]) -> Software:
    """Weights are cut over a group of ranks, and the groups hold the same (hybrid sharding: Zhao et al. 2023, arXiv:2304.11277,
    section 3.2.2)."""
    return replace(used, shard_group=int(next(size for size in found.groups() if size)))


def _flash(used: Software, _: re.Match[str]) -> Software:
    return replace(used, fused_attention=True)


def _wide_gathers(used: Software, _: re.Match[str]) -> Software:
    """Weights are gathered as they are kept, and cast by autocast (mosaicml/composer until 0.15: of its modes only PURE casts
    them before)."""
    return replace(used, gathered_bytes=4.0)


def _narrow_gathers(used: Software, _: re.Match[str]) -> Software:
    """Weights are cast before they are gathered (torchao.float8, ``enable_fsdp_float8_all_gather``)."""
    return replace(used, gathered_bytes=1.0)


_Change = Callable[[Software, re.Match[str]], Software]
_OPTIONS: tuple[tuple[str, _Change], ...] = (
    # Of all communication; "no overlap of ..." and "TP overlap off" speak of one kind.
    (
        r"\b(?:no|without) (?:any )?(?:comm(?:unication)? )?overlap(?:ping)?\b(?![-_ ](?:of|for|grad|param))",
        _without_overlap,
    ),
    (r"(?<!tp )(?<!dp )(?<!pp )(?<!ep )\bcomm(?:unication)? overlap (?:is )?(?:off|disabled)\b", _without_overlap),
    (r"\bDDP-impl=(torch|local)\b", _reduced_by),
    (r"\b(?:FSDP|shard(?:ing)?) group (?:size |of )?(\d+)", _in_groups),
    (r"\bHSDP\D{0,12}?\d+ ?x ?(\d+)(?!\d*\s*GB)|\bHSDP\b[^;]{0,30}?\bshard\w*\W{0,3}(\d+)", _in_groups),
    (r"\bflash[ _-]?att(?:entio)?n", _flash),
    (r"\bmixed_precision DEFAULT\b", _wide_gathers),
    (r"\b(?:fp8|float8) all-?gather", _narrow_gathers),
)
"""Words, and what they change; in this order."""


def as_used(software: Software, text: str) -> Software:
    """A software with the options that a text names.

    Args:
        software: as it is by itself.
        text: the words of a row.
    """
    used = _compiled(software, text) if software.name == "torchtitan" else software
    for words, change in _OPTIONS:
        found = _says(words, text)
        if found:
            used = change(used, found)
    return used


def _compiled(software: Software, text: str) -> Software:
    """torchtitan's compiler and its asynchronous tensor parallelism are off unless asked for, and the second needs the first
    (pytorch/torchtitan: its job config, ``compile`` and ``enable_async_tensor_parallel``)."""
    if _says(r"\basync[ -]?tp\b", text):
        return replace(software, overlaps_tensor=_HIDDEN_BY_PARTS)
    if _says(r"\bcompiled?\b", text):
        return software
    # Casts are then operations of their own too: ``narrow`` is what the eager runs of its relative reach.
    apart = {name: value for name, value in software.apart.items() if name != "narrow"}
    return replace(software, fused_loss=False, fused_pointwise=False, apart=apart)


def exchanges_heads(text: str) -> bool:
    """Whether a text says that under ``cp`` positions change places with heads; else keys and values go round a ring."""
    return _OF_HEADS.search(text) is not None
