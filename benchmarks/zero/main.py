"""Step time and peak memory of ZeRO 1, 2, 3 against DDP, FSDP2 and DeepSpeed, two processes on one machine.

python benchmarks/zero/main.py [--rounds 5] [--only NAME]...
"""

import argparse
import importlib.util
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
from datetime import date
from pathlib import Path

import torch
from contenders import NAMES, WORKLOADS

STEPS = {"compute": 2, "communication": 3}


class Pair:
    """Two ranks of one contender, alive and waiting for their turn."""

    def __init__(self, name: str, workload: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as found:
            port = found.getsockname()[1]
        shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        shared |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, str(Path(__file__).parent / "rank.py"), name, workload]
        self.ranks = [
            subprocess.Popen(
                command,
                env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for rank in range(2)
        ]

    def take(self, steps: int) -> list[dict[str, float]] | None:
        """What both ranks measured over this many steps; None when one of them has failed."""
        for rank in self.ranks:
            if rank.poll() is not None:
                return None
            rank.stdin.write(f"{steps}\n")
            rank.stdin.flush()
        answers = [rank.stdout.readline() for rank in self.ranks]
        return [json.loads(answer) for answer in answers] if all(answers) else None

    def end(self) -> None:
        """End both ranks."""
        for rank in self.ranks:
            rank.kill()
            rank.wait()


def measure(workload: str, names: list[str], rounds: int) -> dict[str, dict[str, object]]:
    """Every contender of one workload; they take turns, and the order turns with them."""
    pairs = {}
    try:
        for name in names:
            pairs[name] = Pair(name, workload)
            # The first steps make buffers; one contender at a time, so that nobody waits for the others' start.
            if pairs[name].take(2) is None:
                print(f"{name} failed on the {workload} workload and is left out", file=sys.stderr)
                pairs.pop(name).end()
        seconds: dict[str, list[float]] = {name: [] for name in pairs}
        peaks: dict[str, float] = {}
        order = list(pairs)
        for turn in range(rounds):
            for name in order[turn % len(order) :] + order[: turn % len(order)]:
                answers = pairs[name].take(STEPS[workload])
                assert answers is not None, f"{name} failed in round {turn}"
                seconds[name].append(max(answer["seconds"] for answer in answers) / STEPS[workload])
                peaks[name] = max(answer["peak"] for answer in answers)
    finally:
        for pair in pairs.values():
            pair.end()
    ratios = {
        name: statistics.median(mine / ddp for mine, ddp in zip(values, seconds["ddp"], strict=True))
        for name, values in seconds.items()
    }
    return {
        name: {
            "step_ms": round(statistics.median(values) * 1e3, 1),
            "to_ddp": round(ratios[name], 2),
            "peak_mb": round(peaks[name] / 1e6),
        }
        for name, values in seconds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", action="append", help="these contenders beside ddp; nothing is written then")
    parser.add_argument("--workload", choices=list(WORKLOADS), action="append")
    options = parser.parse_args()
    names = [name for name in NAMES if options.only is None or name in ("ddp", *options.only)]
    if importlib.util.find_spec("deepspeed") is None:
        print("deepspeed is not installed and is left out; install it with pip install 'shoal[bench]'", file=sys.stderr)
        names = [name for name in names if not name.startswith("deepspeed")]
    results: dict[str, object] = {"date": str(date.today()), "torch": torch.__version__, "cpu": platform.processor()}
    for workload in options.workload or WORKLOADS:
        found = measure(workload, names, options.rounds)
        results[workload] = found
        print(f"{workload:<16}{'step ms':>10}{'to ddp':>10}{'peak MB':>10}")
        for name, row in found.items():
            print(f"  {name:<14}{row['step_ms']:>10}{row['to_ddp']:>10}{row['peak_mb']:>10}")
    if options.only is None and options.workload is None:
        target = Path(__file__).parent / "results" / f"{date.today()}.json"
        target.write_text(json.dumps(results, indent=2) + "\n")
        print(f"written to {target}", file=sys.stderr)


if __name__ == "__main__":
    main()
