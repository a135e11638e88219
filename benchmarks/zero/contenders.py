"""The same model, data and optimizer under each way of sharding it: generators that take one step per ``next``."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from shoal.comm.mesh import build_mesh
from shoal.comm.world import World
from shoal.core.plan import Plan
from shoal.models.config import GptConfig
from shoal.models.gpt import Gpt
from shoal.optim.build import build_optimizer, initialise_state
from shoal.optim.config import OptimConfig
from shoal.parallel.analysis.structure import ModuleAnalysis, Stack
from shoal.parallel.data import apply_data_parallel
from shoal.parallel.zero.apply import apply_zero

LR = 1e-3


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and the tokens of one rank's step."""

    layers: int
    hidden: int
    vocab: int
    sequence: int
    batch: int
    """Samples per rank."""

    def build(self) -> nn.Module:
        """The plain model, the same on every rank."""
        torch.manual_seed(1)
        config = GptConfig(layers=self.layers, hidden=self.hidden, heads=8)
        return Gpt(config, vocab=self.vocab, sequence=self.sequence)

    def tokens(self, rank: int) -> Iterator[Tensor]:
        """One batch after another, different on every rank."""
        generator = torch.Generator().manual_seed(rank)
        while True:
            yield torch.randint(self.vocab, (self.batch, self.sequence + 1), generator=generator)


WORKLOADS = {
    "compute": Workload(layers=6, hidden=256, vocab=512, sequence=256, batch=8),
    "communication": Workload(layers=8, hidden=512, vocab=32_000, sequence=16, batch=1),
}


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1))


def adamw(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, weight_decay=0.0, fused=True)


def ddp_steps(world: World, workload: Workload) -> Iterator[None]:
    """Plain DDP over gloo, without a second copy of the gradients."""
    model = DistributedDataParallel(workload.build(), process_group=world.group, gradient_as_bucket_view=True)
    optimizer = adamw(model.parameters())
    for tokens in workload.tokens(world.rank):
        optimizer.zero_grad()
        loss_of(model, tokens).backward()
        optimizer.step()
        yield


def fsdp_steps(world: World, workload: Workload, *, stage: int) -> Iterator[None]:
    """FSDP2 as its guide shows: every block, then the root."""
    model = workload.build()
    for part in (*model.blocks, model):
        fully_shard(part, reshard_after_forward=stage == 3)
    optimizer = adamw(model.parameters())
    for tokens in workload.tokens(world.rank):
        optimizer.zero_grad()
        loss_of(model, tokens).backward()
        optimizer.step()
        yield


def deepspeed_steps(world: World, workload: Workload, *, stage: int) -> Iterator[None]:
    """DeepSpeed with torch's own AdamW, so that all run the same kernel."""
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(world.rank), LOCAL_SIZE=str(world.size))
    import deepspeed  # optional, and it reads its environment when it is imported

    deepspeed.init_distributed(dist_backend="gloo")
    model = workload.build()
    config = {
        "train_micro_batch_size_per_gpu": workload.batch,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=config)
    for tokens in workload.tokens(world.rank):
        engine.backward(loss_of(engine, tokens))
        engine.step()
        yield


def shoal_steps(world: World, workload: Workload, *, stage: int) -> Iterator[None]:
    """Shoal's own engine, by the interface that its trainer uses."""
    model = workload.build()
    mesh = build_mesh(world, Plan(dp=world.size))
    config = OptimConfig(name="adamw", lr=LR)
    if stage == 0:
        wrapped = apply_data_parallel(model, mesh=mesh, device=world.device, unused_parameters=False)
        optimizer = build_optimizer(config, model)
        initialise_state(optimizer)
        for tokens in workload.tokens(world.rank):
            optimizer.zero_grad()
            (loss_of(wrapped, tokens) / world.size).backward()
            optimizer.step()
            yield
        return
    blocks = tuple(f"blocks.{number}" for number in range(workload.layers))
    analysis = ModuleAnalysis(stacks=(Stack(blocks=blocks),))
    reduction = apply_zero(model, analysis=analysis, mesh=mesh, stage=stage, num_microbatches=1, placements={})
    optimizer = build_optimizer(config, model, reduction.updated)
    initialise_state(optimizer)
    for tokens in workload.tokens(world.rank):
        reduction.begin_step()
        with reduction.microbatch(is_last=True):
            (loss_of(model, tokens) / world.size).backward()
        reduction.finish()
        optimizer.step()
        reduction.publish()
        yield


def steps_of(name: str) -> Callable[[World, Workload], Iterator[None]]:
    """The contender with this name, such as ``ddp``, ``fsdp-3`` or ``shoal-2``."""
    if name == "ddp":
        return ddp_steps
    kind, _, stage = name.partition("-")
    kinds = {"fsdp": fsdp_steps, "deepspeed": deepspeed_steps, "shoal": shoal_steps}
    return lambda world, workload: kinds[kind](world, workload, stage=int(stage))


NAMES = (
    "ddp",
    "fsdp-2",
    "fsdp-3",
    "deepspeed-1",
    "deepspeed-2",
    "deepspeed-3",
    "shoal-0",
    "shoal-1",
    "shoal-2",
    "shoal-3",
)
