"""Tables of runs for tests of predictions."""

import csv
from pathlib import Path

from shoal.planner.tables.table import COLUMNS

ROW = {
    "source": "somebody with Megatron", "model": "GPT-1.7B", "layers": 24, "hidden": 2304, "heads": 24, "kv_heads": 24,
    "ffn_hidden": 9216, "seq_len": 2048, "vocab": 51200, "gpu": "A100-80GB-SXM", "n_gpus": 32, "dp": 32, "tp": 1, "pp": 1,
    "cp": 1, "ep": 1, "zero": 0, "schedule_or_interleave": "none", "micro_batch": 16, "global_batch": 512,
    "precision": "fp16", "recompute": "full", "seq_parallel": 0, "measured_metric": "iter_time_s", "measured_value": 3.1,
}  # fmt: skip


def write_table(path: Path, *changes: dict[str, object], columns: tuple[str, ...] = COLUMNS) -> Path:
    """A table whose rows are the row above with changes."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for change in changes or ({},):
            row = {**ROW, **change}
            writer.writerow([row.get(column, "") for column in columns])
    return path
