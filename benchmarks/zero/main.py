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

STEPS = {"compute": 1, "communication": 1}


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
    """Every contender of one workload beside DDP; the two take turns, and who comes first turns with them.

    Two at a time, because all of them together do not fit the memory of a small machine.
    """
    ddp = Pair("ddp", workload)
    found: dict[str, dict[str, object]] = {}
    try:
        if ddp.take(2) is None:
            raise SystemExit("ddp itself failed; run rank.py by hand to see why")
        ddp_seconds: list[float] = []
        for name in names:
            if name != "ddp":
                found[name] = _race(name, workload, ddp, rounds, ddp_seconds)
        answers = ddp.take(1)
        assert answers is not None
        peak = max(answer["peak"] for answer in answers)
    finally:
        ddp.end()
    first = {"step_ms": round(statistics.median(ddp_seconds) * 1e3, 1), "to_ddp": 1.0, "peak_mb": round(peak / 1e6)}
    return {"ddp": first, **{name: row for name, row in found.items() if row}}


def _race(name: str, workload: str, ddp: Pair, rounds: int, ddp_seconds: list[float]) -> dict[str, object]:
    pair = Pair(name, workload)
    seconds: list[float] = []
    ratios: list[float] = []
    peak = 0.0
    try:
        if pair.take(2) is None:
            print(f"{name} failed on the {workload} workload and is left out", file=sys.stderr)
            return {}
        for turn in range(rounds):
            taken = {}
            for who, runner in ((name, pair), ("ddp", ddp)) if turn % 2 else (("ddp", ddp), (name, pair)):
                answers = runner.take(STEPS[workload])
                assert answers is not None, f"{who} failed in round {turn}"
                taken[who] = max(answer["seconds"] for answer in answers) / STEPS[workload]
                if who == name:
                    peak = max(answer["peak"] for answer in answers)
            seconds.append(taken[name])
            ddp_seconds.append(taken["ddp"])
            ratios.append(taken[name] / taken["ddp"])
    finally:
        pair.end()
    return {
        "step_ms": round(statistics.median(seconds) * 1e3, 1),
        "to_ddp": round(statistics.median(ratios), 2),
        "peak_mb": round(peak / 1e6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
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
