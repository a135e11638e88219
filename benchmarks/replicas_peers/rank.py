"""One rank of one contender: waits for a number on its standard input, works that many times, writes how long each took.

python benchmarks/replicas_peers/rank.py NAME FOLDER     (started by main.py)
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from contenders import steps_of

from shoal.comm.world import join_world
from shoal.launch.environments import read_place


def main() -> None:
    torch.set_num_threads(1)
    # What libraries print must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    world = join_world(read_place(os.environ), deadline_seconds=60)
    steps = steps_of(sys.argv[1], world, Path(sys.argv[2]))
    for line in sys.stdin:
        seconds = []
        world.barrier()
        begun, worked = time.perf_counter(), time.process_time()
        for _ in range(int(line)):
            next(steps)
            seconds.append((now := time.perf_counter()) - begun)
            begun = now
        found = {"seconds": seconds, "cpu_seconds": (time.process_time() - worked) / len(seconds)}
        print(json.dumps(found), file=answers, flush=True)
    # Without the libraries' own endings, which wait for ranks that are gone.
    os._exit(0)


if __name__ == "__main__":
    main()
