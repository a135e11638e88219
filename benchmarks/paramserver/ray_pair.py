"""Ray: an actor holds the weights; the driver puts a gradient into the object store and gets the weights out of it.

Run by a python that has ray, numpy and torch; nothing of Shoal is imported. The update is torch's, with one thread, as everywhere
here.
Large arguments and results of actors go through the shared-memory object store and are mapped there without a copy.
"""

import json
import os
import sys
import time
import warnings

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"

import numpy as np
import ray
import torch

RATE = 1e-3


@ray.remote(num_cpus=1)
class Server:
    """The weights."""

    def __init__(self, num_bytes: int) -> None:
        torch.set_num_threads(1)
        self.weights = torch.zeros(num_bytes // 4)

    def push(self, gradient: np.ndarray) -> None:
        """Apply a gradient, which is read from the object store."""
        self.weights.add_(as_tensor(gradient), alpha=-RATE)

    def pull(self) -> np.ndarray:
        """The weights, which are copied to the object store."""
        return self.weights.numpy()


def as_tensor(array: np.ndarray) -> torch.Tensor:
    # The store's memory is read-only, which torch warns of; it is only read.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.from_numpy(array)


def main() -> None:
    num_bytes = int(sys.argv[3])
    torch.set_num_threads(1)
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=2 << 30,
        logging_level="ERROR",
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )
    server = Server.remote(num_bytes)
    gradient = np.ones(num_bytes // 4, np.float32)
    num_pushed = 0
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            started = time.perf_counter()
            ray.get(server.push.remote(gradient))
            weights = ray.get(server.pull.remote())
            seconds.append(time.perf_counter() - started)
            num_pushed += 1
            assert abs(float(weights[-1]) + RATE * num_pushed) < 1e-4
            del weights
        print(json.dumps(seconds), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
