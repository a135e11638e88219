"""One rank of one contender: waits for a number on its standard input, takes that many steps, writes what it measured.

python benchmarks/zero/rank.py NAME WORKLOAD     (started by main.py)
"""

import json
import os
import sys
import time

import torch
from contenders import WORKLOADS, steps_of

from shoal.comm.world import join_world
from shoal.launch.environments import read_place


def resident_bytes(field: str) -> int:
    """``VmHWM`` is the highest that ``VmRSS`` has been."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


def main() -> None:
    name, workload = sys.argv[1], WORKLOADS[sys.argv[2]]
    torch.set_num_threads(1)
    # What libraries print must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    world = join_world(read_place(os.environ), deadline_seconds=120)
    if name.startswith("deepspeed"):
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed  # noqa: F401  # before memory is first read, like all other imports
    world.barrier()
    imported = resident_bytes("VmRSS")
    steps = steps_of(name)(world, workload)
    for number, line in enumerate(sys.stdin):
        world.barrier()
        started = time.perf_counter()
        for _ in range(int(line)):
            next(steps)
        seconds = time.perf_counter() - started
        if number == 0:
            # Building a model is no part of the comparison: the peak is that of training, after the first steps.
            with open("/proc/self/clear_refs", "w") as marks:
                marks.write("5")
        print(json.dumps({"seconds": seconds, "peak": resident_bytes("VmHWM") - imported}), file=answers, flush=True)
    # Without the libraries' own endings, which wait for ranks that are gone.
    os._exit(0)


if __name__ == "__main__":
    main()
