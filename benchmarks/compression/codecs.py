"""What a codec's arithmetic costs: GB/s of float32 that it encodes and decodes, beside a copy of the same tensor.

python benchmarks/compression/codecs.py [--rounds 7] [--elements 4194304]

Codecs and the copy take turns in every round, and the least time of all rounds counts: what else runs on a machine can only
slow a call down. The share is of what the copy moves; the planner has these shares (``planner/pricing/codecs.py``). One thread,
and as many elements as go into one message.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path

import torch
from torch import Tensor

from shoal.compression.build import build_codec
from shoal.compression.config import CompressionConfig
from shoal.compression.powersgd import multiply_left, multiply_right, orthogonalise, product, start_right
from shoal.core.compressrule import CompressRule

CODECS = (
    "fp16",
    "bf16",
    "fp8",
    "int8",
    "int4",
    "qsgd:4",
    "natural",
    "sign",
    "topk:0.01",
    "randk:0.01",
    "threshold:2.5",
    "powersgd:4",
)
ITEM_BYTES = 4


def codec_calls(text: str, flat: Tensor) -> tuple[Callable[[], object], Callable[[], object]]:
    """What encodes and what decodes a tensor; of PowerSGD, both factors, and their product."""
    rule = CompressRule.parse(text)
    codec = build_codec(rule, CompressionConfig())
    if codec is not None:
        sent = codec.encode(flat, key=1)
        return lambda: codec.encode(flat, key=1), lambda: codec.decode(sent, flat.numel())
    side = int(flat.numel() ** 0.5)
    matrix = flat[: side * side].view(side, side)
    right = start_right(side, int(rule.number), 1)

    def factors() -> tuple[Tensor, Tensor]:
        left = orthogonalise(multiply_left(matrix, right))
        return left, multiply_right(matrix, left)

    left, after = factors()
    return factors, lambda: product(left, after)


def measure(elements: int, rounds: int) -> Mapping[str, list[float]]:
    """Seconds of every call in every round, the first of which warms up."""
    flat = torch.randn(elements, generator=torch.Generator().manual_seed(0))
    target = torch.empty_like(flat)
    calls: dict[str, Callable[[], object]] = {"copy": lambda: target.copy_(flat)}
    for text in CODECS:
        calls[f"{text} encode"], calls[f"{text} decode"] = codec_calls(text, flat)
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items() if turn % 2 else reversed(calls.items()):
            started = time.perf_counter()
            call()
            if turn:
                found[name].append(time.perf_counter() - started)
    return found


def summarise(found: Mapping[str, list[float]], elements: int) -> list[dict[str, object]]:
    """The least of all rounds. The copy reads and writes each element: its bandwidth is twice its bytes."""
    whole = elements * ITEM_BYTES
    copied = 2 * whole / min(found["copy"])
    rows: list[dict[str, object]] = []
    for text in CODECS:
        row: dict[str, object] = {"codec": text}
        for way in ("encode", "decode"):
            rate = whole / min(found[f"{text} {way}"])
            row[f"{way}_gb_per_s"] = rate / 1e9
            row[f"{way}_share"] = rate / copied
        rows.append(row)
    return rows


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--elements", type=int, default=1 << 22)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / f"codecs-{date.today()}.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(given.elements, given.rounds)
    rows = summarise(found, given.elements)
    copied = 2 * given.elements * ITEM_BYTES / min(found["copy"]) / 1e9
    print(f"a copy reads and writes {copied:.2f} GB/s; below, GB/s of float32, and its share of that")
    print(f"{'codec':<16}{'encode':>10}{'share':>9}{'decode':>10}{'share':>9}")
    for row in rows:
        print(
            f"{row['codec']:<16}{row['encode_gb_per_s']:>10.2f}{row['encode_share']:>9.3f}"
            f"{row['decode_gb_per_s']:>10.2f}{row['decode_share']:>9.3f}"
        )
    values = {"elements": given.elements, "rounds": given.rounds, "copy_gb_per_s": copied, "codecs": rows}
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(json.dumps({**values, "torch": torch.__version__}, indent=2) + "\n")


if __name__ == "__main__":
    main()
