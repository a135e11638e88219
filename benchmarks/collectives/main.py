"""Collectives of two ranks on one machine: through shared memory and through gloo, every operation, several sizes.

python benchmarks/collectives/main.py [--rounds 7]
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch

from shoal.comm.channel import Channel
from shoal.comm.mesh import build_mesh
from shoal.comm.world import World
from shoal.core.plan import Plan
from shoal.testing.ranks import run_on_ranks

SIZES = {1 << 10: 200, 1 << 16: 100, 1 << 20: 20, 1 << 27: 1}
"""Bytes of the whole tensor, and calls in a round."""


def operations(channel: Channel, num_bytes: int) -> dict[str, Callable[[], object]]:
    whole, half = torch.zeros(num_bytes // 4), num_bytes // 8
    own, counts = torch.zeros(half), [half, half]
    parts, got = [torch.zeros(half), torch.zeros(half)], [torch.zeros(half), torch.zeros(half)]
    return {
        "all_reduce": lambda: channel.all_reduce_(whole),
        "all_reduce_max": lambda: channel.all_reduce_max_(whole),
        "reduce_scatter": lambda: channel.reduce_scatter(whole, own, counts),
        "all_gather": lambda: channel.all_gather(own, whole, counts),
        "all_to_all": lambda: channel.all_to_all(parts, got),
        "ring_shift": lambda: channel.ring_shift(parts[0], got[0]),
        "broadcast": lambda: channel.broadcast_(whole),
    }


def measure(world: World, rounds: int) -> dict[str, list[float]]:
    """Seconds per call of each contender in each round; they take turns."""
    torch.set_num_threads(1)
    plan = Plan(dp=world.size)
    meshes = {"shared": build_mesh(world, plan), "gloo": build_mesh(world, plan, shared=False)}
    found: dict[str, list[float]] = {}
    for num_bytes, calls in SIZES.items():
        contenders = {name: operations(mesh.replicas, num_bytes) for name, mesh in meshes.items()}
        for operation in contenders["gloo"]:
            for turn in range(rounds + 1):
                for name in ("shared", "gloo") if turn % 2 else ("gloo", "shared"):
                    world.barrier()
                    started = time.perf_counter()
                    for _ in range(calls):
                        contenders[name][operation]()
                    if turn:  # the first round warms up
                        found.setdefault(f"{operation}/{num_bytes}/{name}", []).append(
                            (time.perf_counter() - started) / calls
                        )
    meshes["shared"].close()
    return found


def summarise(found: dict[str, list[float]]) -> list[dict[str, object]]:
    """Medians and minima in microseconds, and the median over rounds of gloo's time over ours in the same round."""
    rows: list[dict[str, object]] = []
    for key in found:
        operation, num_bytes, name = key.split("/")
        if name == "gloo":
            continue
        gloo = found[f"{operation}/{num_bytes}/gloo"]
        rows.append(
            {
                "operation": operation,
                "bytes": int(num_bytes),
                "shared_us": statistics.median(found[key]) * 1e6,
                "shared_least_us": min(found[key]) * 1e6,
                "gloo_us": statistics.median(gloo) * 1e6,
                "ratio": statistics.median(theirs / ours for ours, theirs in zip(found[key], gloo, strict=True)),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    rows = summarise(run_on_ranks(measure, 2, options.rounds, deadline_seconds=900.0)[0])
    for row in rows:
        print(f"{row['operation']:12} {row['bytes']:>10} B   shared {row['shared_us']:9.0f} us   ", end="")
        print(f"gloo {row['gloo_us']:9.0f} us   {row['ratio']:5.1f} times")
    results = {"date": str(date.today()), "torch": torch.__version__, "rows": rows}
    target = Path(__file__).parent / "results" / f"{date.today()}.json"
    target.write_text(json.dumps(results, indent=2) + "\n")
    print(f"written to {target}", file=sys.stderr)


if __name__ == "__main__":
    main()
