"""The ranks of one host: each prints for every plan the hash of the weights that it ends in, and what moves its bytes.

python host_ranks.py FIRST_RANK NUM_RANKS PLAN...
"""

import os
import sys

import torch

from shoal.comm.mesh import inner_transport
from shoal.comm.world import join_world
from shoal.core.plan import Plan
from shoal.data.build import build_splits
from shoal.data.config import SyntheticConfig
from shoal.engine.config import TrainConfig
from shoal.launch.environments import read_place
from shoal.models.build import build_model
from shoal.models.config import GptConfig
from shoal.models.losses import build_loss
from shoal.optim.config import OptimConfig
from shoal.trainer.loop import Trainer

DEADLINE_SECONDS = 120.0


def train(world, plan):
    config = GptConfig(layers=2, hidden=32, heads=2)
    data = build_splits(SyntheticConfig(sequence=8, samples=64), 1)
    torch.manual_seed(1)
    trainer = Trainer(
        build_model(config, data.spec),
        data,
        loss=build_loss(config, data.spec),
        train=TrainConfig(steps=3, global_batch=8, seed=1),
        optim=OptimConfig(name="adamw", lr=1e-2),
        plan=Plan.parse(plan),
        world=world,
    )
    for _ in trainer.training_steps():
        pass
    found = trainer.hash_weights()
    moved_by = type(inner_transport(trainer.mesh.replicas)).__name__
    trainer.engine.close()
    # In one write, because the ranks of a host share a pipe.
    os.write(1, f"{found} {moved_by} {plan}\n".encode())


def main():
    first, count, *plans = sys.argv[1:]
    children = []
    for place in range(int(count)):
        # Copies of this process, which has read torch already: that takes most of the time. It has no thread yet.
        child = os.fork()
        if child == 0:
            os.environ |= {"LOCAL_RANK": str(place), "RANK": str(int(first) + place)}
            torch.set_num_threads(1)
            world = join_world(read_place(os.environ), deadline_seconds=DEADLINE_SECONDS)
            for plan in plans:
                train(world, plan)
            os._exit(0)
        children.append(child)
    sys.exit(max(os.waitpid(child, 0)[1] for child in children) and 1)


if __name__ == "__main__":
    main()
