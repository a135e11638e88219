"""One rank of one contender: waits for a number on its standard input, takes that many steps, writes what it measured.

python benchmarks/slow_network/rank.py NAME MODEL     (started by main.py, on its host)
"""

import json
import os
import sys
import time
from contextlib import nullcontext

import torch
from contenders import MODEL, TINY, ShoalSteps, steps_of

from shoal.comm.trafficcounter import traffic_rows
from shoal.comm.world import join_world
from shoal.launch.environments import read_place

DEADLINE_SECONDS = 300


def main() -> None:
    name, config = sys.argv[1], {"full": MODEL, "tiny": TINY}[sys.argv[2]]
    torch.set_num_threads(1)
    # What libraries print must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    world = join_world(read_place(os.environ), deadline_seconds=DEADLINE_SECONDS)
    steps = steps_of(name, world, config)
    for line in sys.stdin:
        seconds, losses = [], []
        world.barrier()
        with steps.traffic.counting() if isinstance(steps, ShoalSteps) else nullcontext({}) as counts:
            begun, worked = time.perf_counter(), time.process_time()
            for _ in range(int(line)):
                losses.append(next(steps))
                seconds.append((now := time.perf_counter()) - begun)
                begun = now
        cpu = (time.process_time() - worked) / len(seconds)
        found = {"seconds": seconds, "cpu_seconds": cpu, "losses": losses, "counted": traffic_rows(counts)}
        print(json.dumps(found), file=answers, flush=True)
    # Without the libraries' own endings, which wait for ranks that are gone.
    os._exit(0)


if __name__ == "__main__":
    main()
