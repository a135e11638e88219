"""What takes a training step between two hosts: torch's DDP with its hooks, Shoal's plans, and a host by itself.

All train the same model from the same weights on the same samples, with torch's fused AdamW on one thread. Every generator takes
a step each time it is asked, and gives the step's loss on this rank.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from shoal.comm.trafficcounter import TrafficCounter
from shoal.comm.world import World
from shoal.core.plan import Plan
from shoal.data.build import build_splits
from shoal.data.config import StdlibConfig
from shoal.data.loading.loader import Loader
from shoal.engine.config import TrainConfig
from shoal.models.build import build_model
from shoal.models.config import GptConfig
from shoal.models.losses import build_loss
from shoal.optim.config import OptimConfig
from shoal.trainer.loop import Trainer

MODEL = GptConfig(layers=8, hidden=768, heads=12, ffn=2208)
"""60 million parameters."""
TINY = GptConfig(layers=2, hidden=128, heads=4)
"""To try the benchmark out."""
DATA = StdlibConfig(sequence=16, limit_bytes=4_000_000)
GLOBAL_BATCH = 2
SEED = 1
LR = 3e-4

Steps = Iterator[float]
PLANS = {
    "shoal dense": "dp=2",
    "shoal int8": "dp=2 compress=int8",
    "shoal powersgd:2": "dp=2 compress=powersgd:2",
    "shoal topk:0.01": "dp=2 compress=topk:0.01",
    "shoal diloco:50": "dp=2 sync=diloco:50",
    "shoal stream:80,8,9 int8": "dp=2 sync=stream:80,8,9 compress=int8",
    "shoal diloco:50 int8": "dp=2 sync=diloco:50 compress=int8",
}


def parts(config: GptConfig) -> tuple[nn.Module, Callable[..., torch.Tensor], Any]:
    """Model, loss and data, the same on every host."""
    data = build_splits(DATA, SEED)
    torch.manual_seed(SEED)
    return build_model(config, data.spec), build_loss(config, data.spec), data


def _own_steps(model: nn.Module, loss_of: Any, data: Any, world: World) -> Steps:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)
    loader = Loader(
        data.train,
        global_batch=GLOBAL_BATCH,
        micro_batch=GLOBAL_BATCH // world.size,
        replica=world.rank,
        num_replicas=world.size,
        seed=SEED,
    )
    while True:
        batch = loader.next().microbatches[0]
        optimizer.zero_grad()
        loss = loss_of(model(*batch.inputs), batch.targets)
        loss.backward()
        optimizer.step()
        yield loss.item()


def alone_steps(world: World, config: GptConfig) -> Steps:
    """Computes its share and tells nobody."""
    model, loss_of, data = parts(config)
    yield from _own_steps(model, loss_of, data, world)


def ddp_steps(world: World, config: GptConfig, *, hook: str | None = None) -> Steps:
    """Torch's DDP, plain or with one of its communication hooks."""
    model, loss_of, data = parts(config)
    wrapped = DistributedDataParallel(
        model,
        process_group=world.group,
        gradient_as_bucket_view=True,
        init_sync=False,
        # With more than one bucket this hook's collectives cross between the ranks, and the run aborts.
        bucket_cap_mb=1000 if hook == "powersgd:2" else None,
    )
    if hook == "fp16":
        wrapped.register_comm_hook(world.group, default_hooks.fp16_compress_hook)
    elif hook == "powersgd:2":
        # From the first step on, which the hook allows from the third.
        state = powerSGD_hook.PowerSGDState(world.group, matrix_approximation_rank=2, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    yield from _own_steps(wrapped, loss_of, data, world)


class ShoalSteps:
    """The trainer that recipes have, without a run directory."""

    def __init__(self, world: World, config: GptConfig, plan: str, *, steps: int = 10**6) -> None:
        model, loss_of, data = parts(config)
        self.trainer = Trainer(
            model,
            data,
            loss=loss_of,
            train=TrainConfig(steps=steps, global_batch=GLOBAL_BATCH, seed=SEED),
            optim=OptimConfig(name="adamw", lr=LR),
            plan=Plan.parse(plan),
            world=world,
        )
        self._steps = self.trainer.training_steps()

    def __iter__(self) -> "ShoalSteps":
        return self

    def __next__(self) -> float:
        return next(self._steps).loss

    @property
    def traffic(self) -> TrafficCounter:
        """What crosses, as the product counts it."""
        return self.trainer.mesh.traffic


TORCH = {"ddp": None, "torch fp16": "fp16", "torch powersgd:2": "powersgd:2"}
ALONE = "compute alone"
EXTRA = ("shoal diloco:50 int8",)
"""Measured when asked for by name only."""
NAMES = (*TORCH, ALONE, *PLANS)


def steps_of(name: str, world: World, config: GptConfig) -> Steps | ShoalSteps:
    """The contender with this name; of Shoal's plans what crosses can be asked for."""
    if name in PLANS:
        return ShoalSteps(world, config, PLANS[name])
    if name == ALONE:
        return alone_steps(world, config)
    return ddp_steps(world, config, hook=TORCH[name])
