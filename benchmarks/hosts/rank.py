"""The ranks of one host and one contender: for each number on its standard input the first writes what so many rounds took.

python benchmarks/hosts/rank.py HOST PER_HOST steps NAME WORKLOAD        (started by main.py, on its host)
python benchmarks/hosts/rank.py HOST PER_HOST collectives NUM_BYTES
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "zero"))

from contenders import WORKLOADS, Workload, steps_of  # benchmarks/zero: the same models, tokens and contenders

from shoal.comm.mesh import build_mesh
from shoal.comm.world import World, join_world
from shoal.core.plan import Plan
from shoal.launch.environments import read_place

DEADLINE_SECONDS = 300
TINY = {
    "compute": Workload(layers=4, hidden=128, vocab=128, sequence=256, batch=4),
    "communication": Workload(layers=2, hidden=128, vocab=8000, sequence=16, batch=1),
}


def prepare(world: World, words: list[str]) -> dict[str, Callable[[], object]]:
    """What is measured, by name."""
    if words[0] == "steps":
        name, workload, size = words[1:]
        steps = steps_of(name)(world, (TINY if size == "tiny" else WORKLOADS)[workload])
        return {"step": lambda: next(steps)}
    channel = build_mesh(world, Plan(dp=world.size)).replicas
    count = int(words[1]) // 4 // world.size
    whole, own, counts = torch.ones(count * world.size), torch.ones(count), [count] * world.size
    return {
        "all_gather": lambda: channel.all_gather(own, whole, counts),
        "reduce_scatter": lambda: channel.reduce_scatter(whole, own, counts),
        "all_reduce": lambda: channel.all_reduce_(whole),
    }


def measure(world: World, operations: dict[str, Callable[[], object]], count: int) -> dict[str, float]:
    """Mean seconds of each operation, and of this process's processor with all its threads."""
    found = {}
    for name, operation in operations.items():
        world.barrier()
        started, used = time.perf_counter(), time.process_time()
        for _ in range(count):
            operation()
        found[name] = (time.perf_counter() - started) / count
        found[f"{name} processor"] = (time.process_time() - used) / count
    return found


def main() -> None:
    host, per_host, *words = sys.argv[1:]
    first = int(host) * int(per_host)
    number = int(os.environ.get("LOCAL_RANK", "-1"))
    if number < 0:
        pipes = [
            subprocess.Popen(
                [sys.executable, *sys.argv],
                env={**os.environ, "LOCAL_RANK": str(place), "RANK": str(first + place)},
                stdin=subprocess.PIPE,
                stdout=None if place == 0 else subprocess.DEVNULL,
                text=True,
            )
            for place in range(int(per_host))
        ]
        for line in sys.stdin:
            for pipe in pipes:
                pipe.stdin.write(line)
                pipe.stdin.flush()
        return
    torch.set_num_threads(1)
    # What libraries print must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    world = join_world(read_place(os.environ), deadline_seconds=DEADLINE_SECONDS)
    operations = prepare(world, words)
    for line in sys.stdin:
        print(json.dumps(measure(world, operations, int(line))), file=answers, flush=True)
    # Without the libraries' own endings, which wait for ranks that are gone.
    os._exit(0)


if __name__ == "__main__":
    main()
