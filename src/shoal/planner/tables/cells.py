"""A table of runs as it is written: the rows of a CSV file, and what the words in its cells mean.

Rows are read with the lines that they begin on, before any cell is. ``csv.DictReader`` would fill up a row that is too short
and drop the end of one that is too long. In both a comma is missing or one too many, and from there on every number stands
under another column's name.

The words in cells mean devices, networks, software, schedules, precision, recompute. Tables are written by people: a cell says
"A100-80GB-SXM", "interleaved-1F1B v=3" or "1 (distributed optimizer, assumed)". What is not understood is no error here, but
for a device: it is said to be unknown, and ``table.py`` says what it took instead, or ``odd_cells`` what it may be.

Some cells are wrong, and some are not understood. What is not known is assumed, and the row is predicted. A number or a type
that there is not (``zero`` 9, ``bf17``) is wrong: its row would be predicted for another run than the table means, and is not.
A word that is not understood (``recompute`` "fulll") may be a name that this version has not learnt: its row is predicted as if
it were not known, out of range, and the word is said. A phrase, or a word by which people say that they do not know, explains,
and nothing is said of it.
"""

import csv
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from shoal.core.errors import RequestError, nearest
from shoal.core.pipelines import SCHEDULES, schedule_facts
from shoal.planner.hardware.devices import Cluster
from shoal.planner.hardware.presets import LINKS, PRESETS, Preset, cluster_of, unknown_device

_MOST_ROWS = 100_000


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row, as it is written."""

    number: int
    """Counted from 0, without the header."""
    line: int
    """Of the file, counted from 1, on which it begins: cells in quotes may go over several."""
    cells: dict[str, str]
    """By column; what a short row lacks is empty."""
    problem: str = ""
    """Why its cells cannot be told apart, where that is so."""


def read_rows(path: Path, *, needed: Sequence[str], optional: Sequence[str]) -> list[Row]:
    """Every row of a CSV file; empty lines are none.

    Args:
        path: the file.
        needed: columns that it must have.
        optional: columns that it may have, and rows may leave out at their end.

    Raises:
        RequestError: there is no such file, it is no CSV file, a needed column is missing or there twice, or there are no rows.
    """
    try:
        # Spreadsheets put a mark in front of UTF-8.
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(_rows(path, file, needed, optional))
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}; give a CSV file that is there") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not a CSV file in UTF-8: {error}; save it as UTF-8") from error
    except csv.Error as error:
        raise RequestError(f"{path} is not a CSV file: {error}; see that every quote is closed") from error
    if not rows:
        raise RequestError(f"{path} has no rows; give a table with at least one run")
    return rows


def _rows(path: Path, file: TextIO, needed: Sequence[str], optional: Sequence[str]) -> Iterator[Row]:
    reader = csv.reader(file)
    header = next((cells for cells in reader if cells), None)
    if header is None:
        raise RequestError(f"{path} is empty; a table of runs begins with a line of columns: {', '.join(needed)}")
    _check_header(path, header, needed, optional)
    number, line = 0, reader.line_num + 1
    for cells in reader:
        # A spreadsheet writes an empty line as commas alone.
        if any(cell.strip() for cell in cells):
            if number == _MOST_ROWS:
                raise RequestError(f"{path} has more than {_MOST_ROWS:,} rows; give it in parts")
            filled = [*cells, *[""] * (len(header) - len(cells))]
            known = dict(zip(header, filled, strict=False))
            yield Row(number=number, line=line, cells=known, problem=_misfit(header, cells, optional))
            number += 1
        line = reader.line_num + 1


def _check_header(path: Path, header: Sequence[str], needed: Sequence[str], optional: Sequence[str]) -> None:
    missing = [column for column in needed if column not in header]
    separator = next((mark for mark in (";", "\t", "|") if len(header) == 1 and mark in header[0]), None)
    if missing and separator is not None:
        raise RequestError(
            f"{path} has its columns separated by {separator!r}, and a table of runs has commas; save it with commas between them"
        )
    if missing:
        others = [column for column in header if column not in needed]
        lowered = {other.strip().lower(): other for other in others}
        close = {column: lowered.get(nearest(column, lowered) or "") for column in missing}
        renames = ", ".join(f"{found!r} to {column!r}" for column, found in close.items() if found)
        fix = f"rename {renames}; " if renames else ""
        raise RequestError(
            f"{path} has {len(header)} columns, and {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not among them; "
            f"{fix}a table of runs has {', '.join(needed)}"
        )
    twice = next((column for column in (*needed, *optional) if header.count(column) > 1), None)
    if twice is not None:
        raise RequestError(f"{path} has the column {twice} {header.count(twice)} times; keep one of them")


def _misfit(header: Sequence[str], cells: Sequence[str], optional: Sequence[str]) -> str:
    """What is wrong with the number of cells; empty ones at the end, and notes that were left out, move nothing."""
    absent = [column for column in header[len(cells) :] if column not in optional]
    extra = [cell for cell in cells[len(header) :] if cell.strip()]
    if absent:
        return f"it has {len(cells)} cells and the header has {len(header)}: {absent[0]} and what follows is missing; give all"
    if extra:
        return (
            f"it has {len(cells)} cells and the header has {len(header)}: {extra[0]!r} is under no column; remove it, or put a "
            f"cell that has a comma in quotes"
        )
    return ""


_DEVICE = re.compile(r"(mi\d{3}[ax]|gb\d00|gh\d00|[abhvl]\d{2,3}s?)(?!\d)", re.IGNORECASE)
_PER_NODE = re.compile(r"(?<!\d)(\d{1,2}) ?x ?(?:MI|GB|GH|V|A|H|B)\d{2,3}|(\d{1,2})-GPU nodes", re.IGNORECASE)

_RATE = re.compile(r"(?:(?<![\d.,])(?P<cards>\d+) ?x ?)?(?<![\d.,])(?P<rate>\d[\d,]*(?:\.\d+)?) ?Gb(?:ps|/s)")
"""Bits a second, not bytes ("600 GB/s")."""
_NODE_WORDS = r"node-node|inter-?node|/ ?node|per node|between nodes|network|ethernet|infiniband|EFA\b|IB\b|RoCE"
"""What follows a rate that is a node's."""
_MOST_PER_NODE = 16
"""Devices of a node that are believed; "64xH100" speaks of a cluster."""


def find_device(text: str) -> Preset:
    """The preset that a cell means: its family, and its memory and form where it says them.

    Raises:
        RequestError: there is none.
    """
    families = {name.split("-")[0] for name in PRESETS}
    family = next((word for word in map(str.lower, _DEVICE.findall(text)) if word in families), None)
    if family is None:
        raise RequestError(
            f"{unknown_device(text)}; `shoal plan` takes devices by numbers of one's own, a table does not"
        )
    alike = [preset for name, preset in PRESETS.items() if name.split("-")[0] == family]
    is_card = "pcie" in text.lower()
    size = re.search(r"(\d+)\s*g(?:i?b)?(?![a-z])", text.lower())
    # Where the memory is not said, the usual one: the last of those without a mark of their own.
    ranked = sorted(
        alike,
        key=lambda preset: (
            ("pcie" in preset.device.name) == is_card,
            size is not None and f"-{size[1]}gb" in preset.device.name,
            preset.is_usual,
            preset.device.memory_bytes,
        ),
    )
    return ranked[-1]


def read_cluster(preset: Preset, num_devices: int, text: str, *, device_cell: str = "") -> Cluster:
    """The cluster of a run: nodes of its device's usual size and network, or of what the row says.

    Args:
        preset: of its device.
        num_devices: all of them.
        text: the words of the row.
        device_cell: the cell of the device, which may say a network's rate; "16xH100" in it is the whole cluster, and no node.
    """
    found = _PER_NODE.search(text)
    said = int(found[1] or found[2]) if found else 0
    at_most = min(said if 1 <= said <= _MOST_PER_NODE else preset.devices_per_node, num_devices)
    num_nodes = _num_nodes(num_devices, at_most)
    devices = -(-num_devices // num_nodes)
    cluster = cluster_of(preset, num_nodes=num_nodes, devices_per_node=devices)
    bandwidth = _network(f"{text}; {device_cell}", devices)
    if not bandwidth or len(cluster.tiers) == 1:
        return cluster
    return replace(cluster, tiers=(cluster.tiers[0], replace(cluster.tiers[1], bandwidth=bandwidth)))


def _num_nodes(num_devices: int, at_most: int) -> int:
    """Nodes of a run that does not fill them: the fewest of which all can give as many, or else the fewest.

    A run on 256 devices of racks of 72 takes 64 of each of four (NVIDIA's block topology for SLURM, ``--segment``), not three
    racks and a half: groups of eight or of sixteen would straddle.
    """
    fewest = -(-num_devices // at_most)
    return next((nodes for nodes in range(fewest, 2 * fewest) if num_devices % nodes == 0), fewest)


def _network(text: str, devices: int) -> float | None:
    """Bytes per second of one device between nodes, where a row says so."""
    if "Omni-Path" in text:
        links = re.search(r"(\d+) Omni-Path links", text)
        return (int(links[1]) if links else 4) * 2 * LINKS["omni-path"].bandwidth / devices
    for rate in _RATE.finditer(text):
        # Several cards of a node are written "8x 400 Gb/s".
        total = int(rate["cards"] or 1) * float(rate["rate"].replace(",", "")) / 8 * 1e9
        after = text[rate.end() : rate.end() + 24]
        if re.match(r"[^;.]{0,20}?(?:/|\bper[ -]) ?(?:GPU|device)", after, re.IGNORECASE):
            return total
        if re.match(rf" ?(?:{_NODE_WORDS})", after, re.IGNORECASE):
            return total / devices
    return None


_SOFTWARE_WORDS = (
    ("torchtitan", ("torchtitan", "TorchTitan", "FSDP2")),
    ("fsdp", ("llm-foundry", "FSDP FULL_SHARD", "FSDP SHARD_GRAD_OP")),
    ("megatron-core", ("Megatron-Bridge", "NeMo", "Megatron-Core", "Megatron-core", "TE 2.")),
    ("bigscience", ("bigscience", "BigScience")),
    ("megatron-deepspeed", ("DeepSpeed",)),
    ("megatron", ("Megatron",)),
)
"""Names of software, its makers' own and of forks, by which a text says what ran; the first that is found counts."""
_RAN_ON = (
    ("megatron-deepspeed", "MT-NLG"),
    ("bigscience", "BLOOM"),
    ("megatron", "Korthikanti"),
)
"""Models and authors of whom it is published what they ran, for texts that name no software: Smith et al. 2022
(arXiv:2201.11990), section 3; Le Scao et al. 2022 (arXiv:2211.05100), section 3.4; Korthikanti et al. 2022 (arXiv:2205.05198),
section 6."""
_OWN_SOFTWARE = ("Llama-3", "Llama 3", "LLaMA", "DeepSeek")
"""Models whose makers ran a software of their own, whatever word for sharding they use: they get the likeliest one, and are out
of the calibrated range."""
_RECENT = re.compile(r"\b(gb\d00|gh\d00|[bh]\d{2,3}|mi3\d\d[ax])", re.IGNORECASE)


def read_software(text: str) -> str | None:
    """The name of a software of ``SOFTWARE`` that a text speaks of; None where it speaks of none."""
    named = next((name for name, words in _SOFTWARE_WORDS if any(word in text for word in words)), None)
    named = named or next((name for name, word in _RAN_ON if word in text), None)
    if named is None and "FSDP" in text and not any(word in text for word in _OWN_SOFTWARE):
        return "fsdp"
    return named


_GRAPHED = (26, 6)
"""Year and month of the NeMo container from which on steps with experts in MXFP8 are captured whole."""


def release_of(software: str, text: str, precision: str, *, has_experts: bool) -> str:
    """The software as of the release that a text names, where what it does depends on that."""
    found = re.search(r"(\d\d)\.(\d\d)(?:\.\d+)? NeMo", text)
    is_new = found is not None and (int(found[1]), int(found[2])) >= _GRAPHED
    is_graphed = software == "megatron-core" and is_new and has_experts and "mx" in precision.lower()
    return "megatron-core-graphs" if is_graphed else software


def likely_software(device: str, zero: int | None, *, has_stages: bool) -> str:
    """What a run of an unknown software is most like: by whether only its weights are sharded, and how old its device is."""
    if zero == 3 and not has_stages:
        return "fsdp"
    return "megatron-core" if _RECENT.match(device) else "megatron"


_PRECISIONS = (
    ("float4", ("fp4", "float4", "mxfp4", "nvfp4")),
    ("float8", ("fp8", "float8", "mxfp8", "e4m3")),
    ("bfloat16", ("bf16", "bfloat16")),
    ("float16", ("fp16", "float16", "half", "amp")),
    ("tf32", ("tf32",)),
    ("float32", ("fp32", "float32", "single")),
    ("float64", ("fp64", "float64", "double")),
)


def read_precision(text: str) -> str | None:
    """The compute type of a cell, the narrowest that it names: what is added up in 32 bits is computed in 16."""
    lowered = text.lower()
    return next((name for name, words in _PRECISIONS if any(word in lowered for word in words)), None)


_SCHEDULE_WORDS = (("zb1p", "zb-h1"), ("zb2p", "zb-h2"), ("zero-bubble", "zb-h1"), ("zerobubble", "zb-h1"))


def _chunks(text: str) -> int | None:
    found = re.search(r"v\s*=\s*(\d+)", text) or re.search(r"(?:vp|vpp|virtual)\D{0,3}(\d+)", text, re.IGNORECASE)
    return int(found[1]) if found else None


def is_schedule(text: str) -> bool:
    """Whether a cell names a schedule, or how many chunks each rank has."""
    word = re.sub(r"[\s_]+", "-", text.lower())
    named = (*SCHEDULES, "interleav", *(other for other, _ in _SCHEDULE_WORDS))
    return _chunks(text) is not None or any(name in word for name in named)


def read_schedule(text: str) -> tuple[str, int | None]:
    """The schedule that a cell names, and the chunks of each rank where it has several; 1F1B where it names none."""
    given = _chunks(text)
    chunks = 1 if given is None else given
    word = re.sub(r"[\s_]+", "-", text.lower())
    if chunks > 1 or re.search(r"(?<!non-)interleav", word) or word == "1f1b-i":
        return "interleaved", max(2, chunks)
    known = sorted((name for name in SCHEDULES if name not in ("1f1b", "interleaved")), key=len, reverse=True)
    alias = next((name for other, name in _SCHEDULE_WORDS if other in word), "1f1b")
    name = next((name for name in known if name in word), alias)
    own = schedule_facts(name).chunks
    return name, own if own > 1 else None


_NO, _YES = ("none", "no", "off", "false", "0"), ("full", "yes", "on", "true", "1", "block", "uniform", "ac")


def read_recompute(text: str) -> str:
    """none, selective, full, or ``unknown``."""
    words = re.findall(r"[a-z0-9.]+", text.lower())
    first = words[0].removesuffix(".0") if words else ""
    # "op-level AC" keeps the results of chosen operations and computes the others again (torchtitan's ``selective_ac_option``).
    if first.startswith("selective") or first in ("sac", "op", "ops"):
        return "selective"
    return "none" if first in _NO else "full" if first in _YES else "unknown"


def is_on(text: str) -> bool:
    """Whether a cell says that something is on: 1, yes, true, also behind a word such as ``assumed``."""
    words = re.findall(r"[a-z0-9]+", text.lower())
    return any(word in ("1", "yes", "on", "true") for word in words)


def read_zero(text: str) -> int | None:
    """The stage that a cell begins with, or names as FSDP or ZeRO; None where it names none."""
    found = re.match(r"\s*([0-3])", text) or re.search(r"zero[\s-]*([0-3])", text, re.IGNORECASE)
    if found:
        return int(found[1])
    return 3 if "fsdp" in text.lower() or "hsdp" in text.lower() else None


_UNSAID = (
    "?", "??", "-", "--", "n/a", "n.a.", "na", "nan", "nil", "null", "none", "unknown", "unstated", "unspecified", "unreported",
    "undisclosed", "unclear", "assumed", "default", "auto", "tbd", "varies", "various", "mixed", "partial", "custom",
)  # fmt: skip
_COUNTS = ("heads", "kv_heads", "ffn_hidden", "vocab", "micro_batch", "params_b")
"""Columns of numbers that may be unknown; ``table.py`` asks for the others."""
_TYPE = re.compile(r"(?<![a-z0-9])(?:bf|fp|tf|bfloat|float|mxfp|nvfp|mxint|u?int)\d+(?![a-z0-9])", re.IGNORECASE)
_STAGE = re.compile(r"\s*(-?\d+(?:\.\d+)?)")
_NAMED_STAGE = re.compile(r"zero[\s-]*(\d+)", re.IGNORECASE)
_STAGES = ("0", "1", "2", "3")
_SWITCH = ("0", "1", "no", "yes", "off", "on", "false", "true")
_TYPES = ("fp4", "fp8", "bf16", "fp16", "tf32", "fp32", "fp64")
_OTHER_TYPES = ("fp6", "mxfp6", "int4", "int8", "mxint8")
"""Types that there are, and no preset has a peak for: not understood, and not wrong."""
_RECOMPUTE = ("none", "selective", "full", "unknown")
_YES_OR_NO = {"no": 0.0, "false": 0.0, "yes": 1.0, "true": 1.0}
_NO_SHARDS = ("no", "off", "false", "ddp", "dp")


def is_unsaid(text: str) -> bool:
    """Whether a cell says that something is not known: blank, a word for it, or a phrase that explains."""
    words = text.lower().split()
    return len(words) != 1 or words[0].strip("()~") in _UNSAID


def read_measured(row: Mapping[str, str]) -> float | None:
    """What was measured, as a number; of ``oom`` also in a word. None where the cell has neither."""
    text = (row.get("measured_value") or "").strip()
    if row.get("measured_metric", "").strip() == "oom" and text.lower() in _YES_OR_NO:
        return _YES_OR_NO[text.lower()]
    value = _number(text)
    return None if value is None or math.isnan(value) else value


def wrong_cells(row: Mapping[str, str]) -> Iterator[str]:
    """What there is not, one sentence each: the column, its value and what it may be."""
    stage = _STAGE.match(row["zero"]) or _NAMED_STAGE.search(row["zero"])
    if stage is not None and float(stage[1]) not in (0, 1, 2, 3):
        yield _choose("zero", row["zero"], _STAGES)
    types = [found.lower() for found in _TYPE.findall(row["precision"])]
    if read_precision(row["precision"]) is None and any(found not in _OTHER_TYPES for found in types):
        yield _choose("precision", row["precision"], _TYPES)


def odd_cells(row: Mapping[str, str]) -> Iterator[str]:
    """What is not understood, one sentence each: the column, its value and what it may be."""
    for column in _COUNTS:
        text = row.get(column, "")
        if _number(text) is None and not is_unsaid(text):
            yield f"{column} is {text.strip()!r}, and a number is needed, or blank where it is not known"
    yield from _odd_measured(row)
    zero = row["zero"].strip()
    if read_zero(zero) is None and zero.lower() not in _NO_SHARDS and not is_unsaid(zero):
        yield _choose("zero", zero, _STAGES)
    if read_precision(row["precision"]) is None and not is_unsaid(row["precision"]):
        yield _choose("precision", row["precision"], _TYPES)
    if read_recompute(row["recompute"]) == "unknown" and not is_unsaid(row["recompute"]):
        yield _choose("recompute", row["recompute"], _RECOMPUTE)
    switch = row["seq_parallel"].strip().lower().removesuffix(".0")
    if switch not in _SWITCH and not is_unsaid(switch):
        yield _choose("seq_parallel", row["seq_parallel"], ("0", "1"))
    schedule = row["schedule_or_interleave"]
    has_stages = (_number(row["pp"]) or 1) > 1
    if has_stages and not is_schedule(schedule) and not is_unsaid(schedule):
        yield _choose("schedule_or_interleave", schedule, tuple(SCHEDULES))


def _odd_measured(row: Mapping[str, str]) -> Iterator[str]:
    """A value that its metric cannot have. Said, and predicted all the same: predictions do not ask what was measured."""
    metric, measured = row["measured_metric"].strip(), read_measured(row)
    if metric == "mfu" and measured is not None and measured > 1:
        yield (
            f"measured_value is {row['measured_value'].strip()!r}, and mfu is a share, 1 at most; give {measured / 100:g}, or "
            f"measured_metric mfu_percent"
        )
    if metric == "oom" and measured is not None and measured not in (0, 1):
        yield f"measured_value is {row['measured_value'].strip()!r}, and oom is 0 or 1, no or yes, false or true; give one"


def _choose(column: str, text: str, allowed: tuple[str, ...]) -> str:
    close = nearest(text.strip().lower(), allowed)
    offer = f"did you mean {close!r}? " if close else ""
    return f"{column} is {text.strip()!r}; {offer}it may be {', '.join(allowed)}, or blank where it is not known"


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return None if math.isinf(value) else value
