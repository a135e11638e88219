"""What a codec's arithmetic costs: GB/s of float32 that it encodes and decodes, beside a copy of the same tensor.

python benchmarks/compression/main.py [--rounds 7] [--elements 4194304] [--only CODEC]... [--add] [--results FILE]

Codecs and the copy take turns in every round, and the least time of all rounds counts: what else runs on a machine can only
slow a call down. The share is of what the copy moves; the planner has these shares (``planner/pricing/codecs.py``). One thread,
and as many elements as go into one message.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.compression.build import build_codec
from shoal.compression.config import CompressionConfig
from shoal.compression.powersgd import multiply_left, multiply_right, orthogonalise, product, start_right
from shoal.core.compressrule import CompressRule
from shoal.replicas.sparse import decode_largest, encode_largest

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
    "sparse:0.03",
)
"""Those of ``compress``, and what ``sync=sparse`` does to a change."""
ITEM_BYTES = 4
HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- made by main.py: begin -->", "<!-- made by codecs.py: end -->"


def codec_calls(text: str, flat: Tensor) -> tuple[Callable[[], object], Callable[[], object]]:
    """What encodes and what decodes a tensor; of PowerSGD, both factors, and their product."""
    if text.startswith("sparse:"):
        keep = float(text.partition(":")[2])
        payload = torch.cat(list(encode_largest(flat, keep, bits=32)))
        return lambda: list(encode_largest(flat, keep, bits=32)), lambda: decode_largest(
            payload, 0, flat, keep, bits=32
        )
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


def measure(elements: int, rounds: int, codecs: Sequence[str]) -> Mapping[str, list[float]]:
    """Seconds of every call in every round, the first of which warms up."""
    flat = torch.randn(elements, generator=torch.Generator().manual_seed(0))
    target = torch.empty_like(flat)
    calls: dict[str, Callable[[], object]] = {"copy": lambda: target.copy_(flat)}
    for text in codecs:
        calls[f"{text} encode"], calls[f"{text} decode"] = codec_calls(text, flat)
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items() if turn % 2 else reversed(calls.items()):
            started = time.perf_counter()
            call()
            if turn:
                found[name].append(time.perf_counter() - started)
    return found


def summarise(found: Mapping[str, list[float]], elements: int, codecs: Sequence[str]) -> list[dict[str, Any]]:
    """The least of all rounds. The copy reads and writes each element: its bandwidth is twice its bytes."""
    whole = elements * ITEM_BYTES
    copied = 2 * whole / min(found["copy"])
    rows: list[dict[str, Any]] = []
    for text in codecs:
        row: dict[str, Any] = {"codec": text}
        for way in ("encode", "decode"):
            rate = whole / min(found[f"{text} {way}"])
            row[f"{way}_gb_per_s"] = rate / 1e9
            row[f"{way}_share"] = rate / copied
        rows.append(row)
    return rows


def as_markdown(results: Mapping[str, Any]) -> str:
    """The README's table."""
    lines = [
        f"A copy reads and writes {results['copy_gb_per_s']:.1f} GB/s.",
        "",
        "| codec | encodes, GB/s of float32 | of the copy | decodes, GB/s | of the copy |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['codec']} | {row['encode_gb_per_s']:.2f} | {row['encode_share']:.3f} | "
        f"{row['decode_gb_per_s']:.2f} | {row['decode_share']:.3f} |"
        for row in results["codecs"]
    ]
    return "\n".join(lines)


def write_readme(table: str) -> None:
    """Put the table into the README, between its marks."""
    page = HERE / "README.md"
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}")


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--elements", type=int, default=1 << 22)
    parser.add_argument("--only", action="append", help="these codecs beside the copy; nothing is written then")
    parser.add_argument(
        "--add", action="store_true", help="put those of --only into the newest results, which keep the others"
    )
    parser.add_argument("--results", type=Path, help="write the table of these again, and measure nothing")
    given = parser.parse_args()
    if given.results is not None:
        results = json.loads(given.results.read_text())
    else:
        torch.set_num_threads(1)
        codecs = given.only or CODECS
        found = measure(given.elements, given.rounds, codecs)
        copied = 2 * given.elements * ITEM_BYTES / min(found["copy"]) / 1e9
        results = {"elements": given.elements, "rounds": given.rounds, "copy_gb_per_s": copied}
        results |= {"codecs": summarise(found, given.elements, codecs), "torch": torch.__version__}
    if given.add:
        newest = max((HERE / "results").glob("*.json"))
        others = json.loads(newest.read_text())
        kept = [row for row in others["codecs"] if row["codec"] not in given.only]
        results = {**others, "codecs": [*kept, *results["codecs"]]}
        newest.write_text(json.dumps(results, indent=2) + "\n")
    table = as_markdown(results)
    print(table)
    if given.only and not given.add:
        return
    write_readme(table)
    if given.add:
        return
    if given.results is None:
        target = HERE / "results" / f"{date.today()}.json"
        target.parent.mkdir(exist_ok=True)
        target.write_text(json.dumps(results, indent=2) + "\n")
        print(f"written to {target}", file=sys.stderr)


if __name__ == "__main__":
    main()
