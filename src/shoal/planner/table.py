"""A table of measured runs, read into jobs and plans: the columns of published measurements, and how their words are understood.

Nothing here depends on who published a row, except the software that ran, which decides the stack of constants.
"""

import csv
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.core.errors import RequestError
from shoal.core.plan import Plan
from shoal.costs.transformer import TransformerShape, transformer_chain
from shoal.planner.hardware import Cluster
from shoal.planner.presets import LINKS, PRESETS, Preset, cluster_of
from shoal.planner.stacks import SOFTWARE

COLUMNS = (
    "source", "model", "layers", "hidden", "heads", "kv_heads", "ffn_hidden", "seq_len", "vocab", "gpu",
    "n_gpus", "dp", "tp", "pp", "cp", "ep", "zero", "schedule_or_interleave", "micro_batch", "global_batch",
    "precision", "recompute", "seq_parallel", "measured_metric", "measured_value",
)  # fmt: skip
_OPTIONAL = ("params_b", "notes")
_MOST_ROWS = 100_000
_MOST_LAYERS = 100_000
_MANY = 10**12


@dataclass(frozen=True, kw_only=True)
class Run:
    """One row, understood."""

    row: int
    source: str
    metric: str
    measured: float
    shape: TransformerShape
    plan: Plan
    micro_batch: float
    global_batch: int
    num_devices: int
    cluster: Cluster
    device: str
    software: str
    precision: str
    recompute: str
    """none, selective, full, or ``unknown``."""
    group: tuple[str, ...]
    """What rows must have in common for their order to mean anything: the same model on the same devices."""
    assumed: tuple[str, ...] = ()
    """What the row does not say and was taken for granted."""


@dataclass(frozen=True)
class Unread:
    """A row that cannot be predicted, and why."""

    row: int
    source: str
    metric: str
    measured: float | None
    reason: str


def read_table(path: Path) -> list[Run | Unread]:
    """Every row of a CSV file.

    Raises:
        RequestError: there is no such file, or a column is missing.
    """
    try:
        # Spreadsheets put a mark in front of UTF-8.
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
            if missing:
                raise RequestError(
                    f"{path} has {len(reader.fieldnames or ())} columns, and {', '.join(missing)} is not among them; a table of "
                    f"runs has {', '.join(COLUMNS)}"
                )
            rows = [_whole(row) for row, _ in zip(reader, range(_MOST_ROWS + 1), strict=False)]
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}; give a CSV file that is there") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise RequestError(f"{path} is not a CSV file in UTF-8: {error}") from error
    if not rows:
        raise RequestError(f"{path} has no rows; give a table with at least one run")
    if len(rows) > _MOST_ROWS:
        raise RequestError(f"{path} has more than {_MOST_ROWS} rows; give it in parts")
    return [_read_row(number, row) for number, row in enumerate(rows)]


def _whole(row: Mapping[str | None, str | list[str] | None]) -> dict[str, str]:
    """A row whose missing cells are empty; cells beyond the last column are nobody's."""
    return {name: cell if isinstance(cell, str) else "" for name, cell in row.items() if name is not None}


class _Unreadable(Exception):
    """A cell that cannot be understood."""


def _read_row(number: int, row: Mapping[str, str]) -> Run | Unread:
    measured = _float(row, "measured_value")
    try:
        return _understand(number, row, measured)
    except (_Unreadable, RequestError) as why:
        return Unread(number, row["source"], row["measured_metric"], measured, str(why))


def _understand(number: int, row: Mapping[str, str], measured: float | None) -> Run:
    if measured is None or (measured <= 0 and row["measured_metric"] != "oom"):
        raise _Unreadable(f"measured_value is {row['measured_value']!r}, and a number above 0 is needed")
    assumed: list[str] = []
    text = " ".join(row.get(column) or "" for column in ("source", "schedule_or_interleave", "zero", "notes"))
    software = _software(text)
    shape = _shape(row, text, software, assumed)
    degrees = {axis: _need(row, axis) if row[axis] else 1 for axis in ("dp", "tp", "pp", "cp", "ep")}
    num_devices = _need(row, "n_gpus")
    global_batch = _need(row, "global_batch")
    micro_batch = _float(row, "micro_batch")
    if micro_batch is None:
        assumed.append("micro_batch 1")
        micro_batch = 1.0
    if micro_batch <= 0:
        raise _Unreadable(f"micro_batch is {row['micro_batch']!r}, and a number above 0 is needed")
    product = degrees["dp"] * degrees["tp"] * degrees["pp"] * degrees["cp"]
    if product != num_devices:
        raise _Unreadable(
            f"dp {degrees['dp']} x tp {degrees['tp']} x pp {degrees['pp']} x cp {degrees['cp']} = {product} are not the "
            f"{num_devices} of n_gpus"
        )
    preset = find_device(row["gpu"])
    recompute = next(iter(row["recompute"].lower().split()), "unknown")
    if recompute not in ("none", "selective", "full"):
        recompute = "unknown"
        assumed.append("as much recompute as memory asks for")
    chunks = _chunks(row["schedule_or_interleave"])
    zero = _leading_digit(row["zero"])
    sequence = row["seq_parallel"].strip().lower()
    plan = Plan(
        dp=degrees["dp"],
        tp=degrees["tp"],
        sp=degrees["tp"] > 1 and sequence.endswith("1"),
        cp=degrees["cp"],
        pp=degrees["pp"],
        ep=degrees["ep"],
        schedule=None if degrees["pp"] == 1 else "interleaved" if chunks > 1 else "1f1b",
        chunks=chunks if chunks > 1 and degrees["pp"] > 1 else None,
        microbatches=max(1, round(global_batch / (degrees["dp"] * micro_batch))),
        zero=(zero or 0) if degrees["dp"] > 1 else 0,
        recompute="none" if recompute == "unknown" else recompute,
    )
    return Run(
        row=number,
        source=row["source"],
        metric=row["measured_metric"],
        measured=measured,
        shape=shape,
        plan=plan,
        micro_batch=micro_batch,
        global_batch=global_batch,
        num_devices=num_devices,
        cluster=_cluster(preset, num_devices, text),
        device=preset.device.name,
        software=software,
        precision=_precision(row["precision"]),
        recompute=recompute,
        group=(row["source"], row["model"], row["gpu"], row["n_gpus"], row["seq_len"], row["global_batch"]),
        assumed=tuple(assumed),
    )


_DEVICE = re.compile(r"(mi250x|mi300x|mi325x|gb\d00|[bhva]\d00)", re.IGNORECASE)


def find_device(text: str) -> Preset:
    """The preset that a cell means: its family, and its memory and form where it says them.

    Raises:
        RequestError: there is none.
    """
    found = _DEVICE.search(text)
    if found is None:
        raise RequestError(f"there is no device {text!r}; there are {', '.join(PRESETS)}")
    family = found[1].lower()
    alike = [preset for name, preset in PRESETS.items() if name.split("-")[0] == family]
    if not alike:
        raise RequestError(f"there is no device {text!r}; there are {', '.join(PRESETS)}")
    is_card = "pcie" in text.lower()
    size = re.search(r"(\d+)\s*gb", text.lower())
    # Presets are in order of their memory; what is not said is the larger one.
    ranked = sorted(
        alike,
        key=lambda preset: (
            ("pcie" in preset.device.name) == is_card,
            size is not None and f"-{size[1]}gb" in preset.device.name,
            preset.device.memory_bytes,
        ),
    )
    return ranked[-1]


def _cluster(preset: Preset, num_devices: int, text: str) -> Cluster:
    per_node = re.search(r"(\d)x(?:V|A|H|B)\d00", text)
    devices = int(per_node[1]) if per_node else preset.devices_per_node
    devices = min(devices, num_devices)
    cluster = cluster_of(preset, num_nodes=-(-num_devices // devices), devices_per_node=devices)
    bandwidth = _network(text, devices)
    if bandwidth is None or len(cluster.tiers) == 1:
        return cluster
    return replace(cluster, tiers=(cluster.tiers[0], replace(cluster.tiers[1], bandwidth=bandwidth)))


def _network(text: str, devices: int) -> float | None:
    """Bytes per second of one device between nodes, where a row says so."""
    if "Omni-Path" in text:
        links = re.search(r"(\d+) Omni-Path links", text)
        return (int(links[1]) if links else 4) * 2 * LINKS["omni-path"].bandwidth / devices
    rate = re.search(r"(\d+) ?Gb(?:ps|/s) (?:node-node|inter-node)", text)
    return int(rate[1]) / 8 * 1e9 / devices if rate else None


_SOFTWARE_WORDS = (
    ("fsdp", ("llm-foundry", "torchtitan", "FSDP FULL_SHARD")),
    (
        "megatron-core",
        ("Megatron-Bridge", "NeMo", "Megatron-Core", "SimuMax", "TE 2", "Llama-3", "Llama 3", "DeepSeek"),
    ),
    ("bigscience", ("bigscience", "BigScience", "BLOOM")),
    ("megatron-deepspeed", ("DeepSpeed", "vTrain", "MT-NLG")),
    ("megatron", ("Megatron", "Korthikanti", "LLaMA")),
)


def _software(text: str) -> str:
    for name, words in _SOFTWARE_WORDS:
        if any(word in text for word in words):
            return name
    assert "megatron" in SOFTWARE
    return "megatron"


def _shape(row: Mapping[str, str], text: str, software: str, assumed: list[str]) -> TransformerShape:
    for column in ("layers", "hidden", "seq_len"):
        if not row[column]:
            raise _Unreadable(f"{column} is missing: the model's dimensions are not known")
    hidden = _need(row, "hidden")
    heads = _given(row, "heads")
    if heads is None:
        heads = _given(row, "kv_heads") or _likely_heads(hidden)
        assumed.append(f"{heads} heads")
    vocab = _given(row, "vocab")
    if vocab is None:
        vocab = 51200
        assumed.append("a vocabulary of 51200")
    experts = _experts(text)
    latent = "MLA" in text
    query = re.search(r"q_lora (\d+)", text)
    key = re.search(r"kv_lora (\d+)", text)
    head_size = re.search(r"head_dim (\d+)", text)
    shape = TransformerShape(
        layers=_need(row, "layers", most=_MOST_LAYERS),
        hidden=hidden,
        heads=heads,
        kv_heads=_given(row, "kv_heads"),
        ffn=_given(row, "ffn_hidden"),
        vocab=vocab,
        sequence=_need(row, "seq_len"),
        head_size=128 if latent else int(head_size[1]) if head_size else None,
        tied="untied" not in text and software not in ("megatron-core", "shoal"),
        query_rank=int(query[1]) if query else 1536 if latent else 0,
        kv_rank=int(key[1]) if key else 512 if latent else 0,
        fused_attention=software in ("megatron-core", "fsdp"),
        **experts,
    )
    return _gate(shape, row, text)


def _gate(shape: TransformerShape, row: Mapping[str, str], text: str) -> TransformerShape:
    """Two matrices in the feed-forward or three: what the number of parameters says, or else what such models have."""
    plain = shape
    gated = replace(shape, is_gated=True, dropout=False, learned_positions=False)
    stated = _float(row, "params_b")
    if stated is not None and shape.experts == 1:
        return min((plain, gated), key=lambda one: abs(transformer_chain(one).weights / 1e9 - stated))
    is_known = shape.experts > 1 or re.search(r"llama|qwen|deepseek|mixtral|mistral", row["model"], re.IGNORECASE)
    return gated if is_known else plain


def _experts(text: str) -> dict[str, Any]:
    found = re.search(r"MoE:? (\d+) (?:routed|experts) top-(\d+)", text)
    if not found:
        return {}
    values: dict[str, Any] = {"experts": int(found[1]), "chosen_experts": int(found[2])}
    width = re.search(r"moe_ffn (\d+)", text)
    if width:
        values["expert_ffn"] = int(width[1])
    shared = re.search(r"shared ffn (\d+)", text)
    one_shared = re.search(r"\+ (\d+) shared", text)
    if shared:
        values["shared_ffn"] = int(shared[1])
    elif one_shared and width:
        values["shared_ffn"] = int(one_shared[1]) * int(width[1])
    dense = re.search(r"first (\d+) layers dense|(\d+) dense layer|dense_layers=(\d+)", text)
    if dense:
        values["dense_layers"] = int(next(group for group in dense.groups() if group))
    return values


def _likely_heads(hidden: int) -> int:
    """Heads of about 128 features."""
    sizes = [size for size in range(64, 193) if hidden % size == 0]
    return hidden // min(sizes, key=lambda size: abs(size - 128)) if sizes else max(1, hidden // 128)


def _precision(text: str) -> str:
    lowered = text.lower()
    for word, name in (("fp4", "float4"), ("fp8", "float8"), ("bf16", "bfloat16"), ("fp32", "float32")):
        if word in lowered and not (word == "fp32" and "16" in lowered):
            return name
    return "float16"


def _chunks(text: str) -> int:
    found = re.search(r"v=(\d+)", text)
    return int(found[1]) if found else 1


def _leading_digit(text: str) -> int | None:
    return int(text[0]) if text and text[0].isdigit() else None


def _float(row: Mapping[str, str], column: str) -> float | None:
    try:
        value = float(row.get(column, ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _given(row: Mapping[str, str], column: str) -> int | None:
    """A count, where there is one; a word in its place says that it is not known."""
    return None if _float(row, column) is None else _need(row, column)


def _need(row: Mapping[str, str], column: str, *, most: int = _MANY) -> int:
    value = _float(row, column)
    if value is None or not 1 <= value <= most:
        raise _Unreadable(f"{column} is {row[column]!r}, and a whole number from 1 to {most:,} is needed")
    return int(value)
