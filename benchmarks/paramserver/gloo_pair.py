"""gloo's send and recv: rank 1 holds the weights, rank 0 sends a gradient and receives the weights."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from shoal.comm.parentdeath import die_with_parent

RATE = 1e-3


def join(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)


def serve(num_bytes: int) -> None:
    weights, gradient, go_on = torch.zeros(num_bytes // 4), torch.empty(num_bytes // 4), torch.ones(1)
    while True:
        dist.recv(go_on, 0)
        if not go_on.item():
            return
        dist.recv(gradient, 0)
        weights.add_(gradient, alpha=-RATE)
        dist.send(weights, 0)


def drive(num_bytes: int) -> None:
    gradient, weights = torch.ones(num_bytes // 4), torch.empty(num_bytes // 4)
    num_pushed = 0
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            dist.send(torch.ones(1), 1)
            started = time.perf_counter()
            dist.send(gradient, 1)
            dist.recv(weights, 1)
            seconds.append(time.perf_counter() - started)
            num_pushed += 1
            assert abs(weights[-1].item() + RATE * num_pushed) < 1e-4
        print(json.dumps(seconds), flush=True)
    dist.send(torch.zeros(1), 1)


def main() -> None:
    torch.set_num_threads(1)
    folder, num_bytes = Path(sys.argv[2]), int(sys.argv[3])
    if len(sys.argv) > 4:
        die_with_parent(int(sys.argv[4]))
        join(1, folder)
        serve(num_bytes)
    else:
        server = subprocess.Popen([sys.executable, *sys.argv, str(os.getpid())])
        join(0, folder)
        drive(num_bytes)
        server.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
