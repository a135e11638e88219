"""A table of measured runs, read into jobs and plans: the columns of published measurements, and how their words are understood.

Nothing here depends on who published a row, except the software that ran, which decides the stack of constants.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.core.errors import RequestError
from shoal.core.plan import Plan
from shoal.costs.transformer import TransformerShape, transformer_costs
from shoal.planner.hardware.devices import WIDE_TYPES, Cluster
from shoal.planner.hardware.software import SOFTWARE, Software
from shoal.planner.tables.cells import (
    Row,
    find_device,
    is_on,
    likely_software,
    odd_cells,
    read_cluster,
    read_measured,
    read_precision,
    read_recompute,
    read_rows,
    read_schedule,
    read_software,
    read_zero,
    release_of,
    wrong_cells,
)
from shoal.planner.tables.options import as_used, exchanges_heads

COLUMNS = (
    "source", "model", "layers", "hidden", "heads", "kv_heads", "ffn_hidden", "seq_len", "vocab", "gpu",
    "n_gpus", "dp", "tp", "pp", "cp", "ep", "zero", "schedule_or_interleave", "micro_batch", "global_batch",
    "precision", "recompute", "seq_parallel", "measured_metric", "measured_value",
)  # fmt: skip
_MEASURED = "measured_value"
_OPTIONAL = ("params_b", "notes")
_MOST_LAYERS = 100_000
_MANY = 10**12
_ROUNDED = 1.01
"""Above its replica's share by so much, a microbatch is that share with fewer digits."""
_FILLED = 4
"""Microbatches for every rank of a pipeline, where a row does not say its batch."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One row, understood."""

    row: int
    line: int
    """Of the file, counted from 1."""
    source: str
    model: str
    metric: str
    measured: float | None
    """None where the table does not say."""
    shape: TransformerShape
    plan: Plan
    micro_batch: float
    global_batch: int
    num_devices: int
    cluster: Cluster
    device: str
    software: Software
    """As it was used."""
    precision: str
    recompute: str
    """none, selective, full, or ``unknown``."""
    group: tuple[str, ...]
    """What rows must have in common for their order to mean anything: the same model on the same devices. A name is not enough:
    models that differ in heads or width have been published under one."""
    assumed: tuple[str, ...] = ()
    """What the row does not say and was taken for granted."""
    odd: tuple[str, ...] = ()
    """What it says and was not understood; in ``assumed`` too."""


@dataclass(frozen=True)
class Unread:
    """A row that cannot be predicted, and why."""

    row: int
    line: int
    source: str
    metric: str
    measured: float | None
    reason: str


def read_table(path: Path) -> list[Run | Unread]:
    """Every row of a CSV file.

    Raises:
        RequestError: there is no such file, a column is missing, or there are no rows.
    """
    # What was measured need not be known: a prediction does not ask for it.
    needed = tuple(column for column in COLUMNS if column != _MEASURED)
    rows = read_rows(path, needed=needed, optional=(_MEASURED, *_OPTIONAL))
    elsewhere = _heads_elsewhere([row.cells for row in rows])
    return [_read_row(row, elsewhere.get((row.cells["source"], row.cells["hidden"]))) for row in rows]


def _heads_elsewhere(rows: Sequence[Mapping[str, str]]) -> dict[tuple[str, str], int]:
    """Heads by source and width: those that most of its rows of that width have, for rows that do not say."""
    counts: dict[tuple[str, str], Counter[int]] = defaultdict(Counter)
    for row in rows:
        heads = _float(row, "heads")
        if heads is not None and heads.is_integer() and 1 <= heads <= _MANY:
            counts[row["source"], row["hidden"]][int(heads)] += 1
    return {key: found.most_common(1)[0][0] for key, found in counts.items()}


class _Unreadable(Exception):
    """A cell that cannot be understood."""


def _read_row(row: Row, heads: int | None) -> Run | Unread:
    cells, measured = row.cells, read_measured(row.cells)
    try:
        if row.problem:
            raise _Unreadable(row.problem)
        return _understand(row, measured, heads)
    except (_Unreadable, RequestError) as why:
        return Unread(row.number, row.line, cells["source"], cells["measured_metric"], measured, str(why))


def _understand(written: Row, measured: float | None, other_heads: int | None) -> Run:
    row = written.cells
    said = row.get(_MEASURED, "").strip()
    if said and (measured is None or (measured <= 0 and row["measured_metric"] != "oom")):
        wanted = "0 or 1, no or yes," if row["measured_metric"] == "oom" else "a number above 0"
        raise _Unreadable(f"{_MEASURED} is {said!r}, and {wanted} is needed, or none")
    wrong = "; ".join(wrong_cells(row))
    if wrong:
        raise _Unreadable(wrong)
    odd = tuple(odd_cells(row))
    assumed: list[str] = list(odd)
    text = "; ".join(
        row.get(column) or "" for column in ("source", "schedule_or_interleave", "zero", "precision", "notes")
    )
    preset = find_device(row["gpu"])
    zero = read_zero(row["zero"])
    degrees, num_devices = _degrees(row, assumed)
    software, shape = _model(row, text, preset.device.name, degrees, other_heads, assumed)
    micro_batch, global_batch = _batch(row, degrees, software, assumed)
    recompute = read_recompute(row["recompute"])
    if recompute == "unknown":
        assumed.append("as much recompute as memory asks for")
    precision = read_precision(row["precision"])
    if precision is None:
        precision = "float16" if preset.device.name.startswith("v100") else "bfloat16"
        assumed.append(precision)
    if precision in WIDE_TYPES:
        shape = replace(shape, item_bytes=8 if precision == "float64" else 4)
    has_stages = degrees["pp"] > 1
    schedule, chunks = read_schedule(row["schedule_or_interleave"])
    if chunks is not None and chunks > shape.layers:
        raise _Unreadable(
            f"schedule_or_interleave is {row['schedule_or_interleave']!r}, {chunks} chunks of each rank, and there are "
            f"{shape.layers} layers; give no more"
        )
    plan = Plan(
        dp=degrees["dp"],
        tp=degrees["tp"],
        sp=degrees["tp"] > 1 and is_on(row["seq_parallel"]),
        cp=degrees["cp"],
        cp_kind="alltoall" if degrees["cp"] > 1 and exchanges_heads(text) else "ring",
        pp=degrees["pp"],
        ep=degrees["ep"],
        schedule=schedule if has_stages else None,
        chunks=chunks if has_stages else None,
        microbatches=max(1, round(global_batch / (degrees["dp"] * micro_batch))),
        zero=(zero or 0) if degrees["dp"] > 1 else 0,
        recompute="none" if recompute == "unknown" else recompute,
    )
    return Run(
        row=written.number,
        line=written.line,
        model=row["model"],
        source=row["source"],
        metric=row["measured_metric"],
        measured=measured,
        shape=shape,
        plan=plan,
        micro_batch=micro_batch,
        global_batch=global_batch,
        num_devices=num_devices,
        cluster=read_cluster(preset, num_devices, text, device_cell=row["gpu"]),
        device=preset.device.name,
        software=software,
        precision=precision,
        recompute=recompute,
        group=(
            row["source"],
            row["model"],
            row["gpu"],
            row["n_gpus"],
            row["seq_len"],
            row["global_batch"],
            *(row[name] for name in ("layers", "hidden", "heads", "kv_heads", "ffn_hidden")),
        ),
        assumed=tuple(assumed),
        odd=odd,
    )


def _model(
    row: Mapping[str, str],
    text: str,
    device: str,
    degrees: Mapping[str, int],
    other_heads: int | None,
    assumed: list[str],
) -> tuple[Software, TransformerShape]:
    """The software as it was used, and the model with its kernels."""
    named = read_software(text)
    if named is None:
        named = likely_software(device, read_zero(row["zero"]), has_stages=degrees["pp"] > 1)
        assumed.append(f"a software like {named}")
    shape = _shape(row, text, named, other_heads, assumed)
    released = release_of(named, text, row["precision"], has_experts=shape.experts > 1)
    software = _check_group(as_used(SOFTWARE[released], text), degrees["dp"] * degrees["cp"], assumed)
    kernels = {
        "fused_attention": software.fused_attention,
        "fused_loss": software.fused_loss,
        "fused_pointwise": software.fused_pointwise,
    }
    return software, replace(shape, **kernels)


def _check_group(software: Software, replicas: int, assumed: list[str]) -> Software:
    """The software with the groups over which it cuts weights, or, where these cannot be, without; that is noted."""
    group = software.shard_group
    if not group or replicas % group == 0:
        return software
    assumed.append(f"weights cut over all {replicas} ranks that share them, which a group of {group} does not divide")
    return replace(software, shard_group=0)


def _degrees(row: Mapping[str, str], assumed: list[str]) -> tuple[dict[str, int], int]:
    """Ranks along every axis, and their product; what one missing cell must be follows from the others."""
    degrees = {axis: _need(row, axis) if row[axis].strip() else 1 for axis in ("dp", "tp", "pp", "cp", "ep")}
    product = degrees["dp"] * degrees["tp"] * degrees["pp"] * degrees["cp"]
    if not row["n_gpus"].strip():
        if not row["dp"].strip():
            raise _Unreadable("n_gpus is '', and so is dp: one of them is needed")
        assumed.append(f"{product} devices")
        return degrees, product
    num_devices = _need(row, "n_gpus")
    if not row["dp"].strip() and num_devices % product == 0:
        degrees["dp"] = num_devices // product
        assumed.append(f"dp {degrees['dp']}")
        return degrees, num_devices
    if product != num_devices:
        raise _Unreadable(
            f"dp {degrees['dp']} x tp {degrees['tp']} x pp {degrees['pp']} x cp {degrees['cp']} = {product} are not the "
            f"{num_devices} of n_gpus"
        )
    return degrees, num_devices


def _batch(
    row: Mapping[str, str], degrees: Mapping[str, int], software: Software, assumed: list[str]
) -> tuple[float, int]:
    """Samples of a microbatch and of a step."""
    micro_batch = _float(row, "micro_batch")
    if micro_batch is None:
        micro_batch = 1.0
        if software.fitted_name == "fsdp" and degrees["pp"] == 1 and row["global_batch"].strip():
            # Nothing is gained by cutting a batch that fits, where every part gathers all weights again.
            micro_batch = max(1.0, _need(row, "global_batch") / degrees["dp"])
        assumed.append(f"micro_batch {micro_batch:g}")
    if micro_batch <= 0:
        raise _Unreadable(f"micro_batch is {row['micro_batch']!r}, and a number above 0 is needed")
    if row["global_batch"].strip():
        global_batch = _need(row, "global_batch")
        share = global_batch / degrees["dp"]
        # Some tables round: 2.67 of 1024 samples over 384 replicas.
        if _float(row, "micro_batch") is not None and micro_batch > _ROUNDED * share:
            raise _Unreadable(
                f"micro_batch is {row['micro_batch']!r}, and a replica has {share:g} samples of a step (global_batch "
                f"{global_batch} / dp {degrees['dp']}); a number above 0 and not above that is needed"
            )
        return micro_batch, global_batch
    # A pipeline is worth having with a few microbatches for every rank.
    num_microbatches = 1 if degrees["pp"] == 1 else _FILLED * degrees["pp"]
    global_batch = max(1, round(micro_batch * degrees["dp"] * num_microbatches))
    assumed.append(f"a batch of {global_batch}")
    return micro_batch, global_batch


def _shape(
    row: Mapping[str, str], text: str, software: str, other_heads: int | None, assumed: list[str]
) -> TransformerShape:
    for column in ("layers", "hidden", "seq_len"):
        if not row[column]:
            raise _Unreadable(f"{column} is missing: the model's dimensions are not known")
    hidden = _need(row, "hidden")
    heads = _given(row, "heads")
    if heads is None:
        heads = max(other_heads or _likely_heads(hidden), _given(row, "kv_heads") or 1)
        assumed.append(f"{heads} heads")
    vocab = _given(row, "vocab")
    if vocab is None:
        vocab = 51200
        assumed.append("a vocabulary of 51200")
    for column in ("kv_heads", "ffn_hidden"):
        if row[column].strip() and _float(row, column) is None:
            assumed.append(f"the usual {column} in place of {row[column].strip()!r}")
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
        **experts,
    )
    return _gate(shape, row, text)


def _gate(shape: TransformerShape, row: Mapping[str, str], text: str) -> TransformerShape:
    """Two matrices in the feed-forward or three, and then one for the embedding and the output layer or two: what the number of
    parameters says, or else what such models have."""
    plain = shape
    gated = replace(shape, is_gated=True, dropout=False, learned_positions=False)
    untied = replace(gated, tied=False)
    stated = _float(row, "params_b")
    if stated is not None and shape.experts == 1:
        return min((plain, gated, untied), key=lambda one: abs(transformer_costs(one).weights / 1e9 - stated))
    is_known = shape.experts > 1 or re.search(r"llama|qwen|deepseek|mixtral|mistral", row["model"], re.IGNORECASE)
    return untied if is_known else plain


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
    if value is None or not value.is_integer() or not 1 <= value <= most:
        raise _Unreadable(f"{column} is {row[column]!r}, and a whole number from 1 to {most:,} is needed")
    return int(value)
