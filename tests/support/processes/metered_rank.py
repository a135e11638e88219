"""One rank of a run on a host of its own: for every number on its standard input it takes that many steps, and tells what the
product has counted meanwhile.

python metered_rank.py PLAN
"""

import json
import os
import sys

import torch

from shoal.comm.mesh import inner_transport
from shoal.comm.torchgroup import TorchTransport
from shoal.comm.trafficcounter import traffic_rows
from shoal.core.plan import Plan
from shoal.data.build import build_splits
from shoal.data.config import StdlibConfig
from shoal.engine.config import TrainConfig
from shoal.models.build import build_model
from shoal.models.config import GptConfig
from shoal.models.losses import build_loss
from shoal.optim.config import OptimConfig
from shoal.trainer.loop import Trainer

MODEL = GptConfig(layers=2, hidden=128, heads=4)


def main():
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    data = build_splits(StdlibConfig(sequence=16, limit_bytes=200_000), 1)
    torch.manual_seed(1)
    trainer = Trainer(
        build_model(MODEL, data.spec),
        data,
        loss=build_loss(MODEL, data.spec),
        train=TrainConfig(steps=10**6, global_batch=2, seed=1),
        optim=OptimConfig(name="adamw", lr=1e-3),
        plan=Plan.parse(sys.argv[1]),
    )
    mesh, steps = trainer.mesh, trainer.training_steps()
    carriers = {
        type(inner_transport(one)) for one in (*mesh.channels.values(), mesh.replicas) if one.transport is not None
    }
    assert carriers == {TorchTransport}, f"two hosts share no memory, and these do: {carriers}"
    for line in sys.stdin:
        with mesh.traffic.counting() as counts:
            for _ in range(int(line)):
                next(steps)
        print(json.dumps(traffic_rows(counts)), file=answers, flush=True)
    os._exit(0)  # Without endings that wait for a rank that is gone.


if __name__ == "__main__":
    main()
