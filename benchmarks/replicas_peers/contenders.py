"""What is measured beside each other on one host, two processes each. A generator does its work each time it is asked.

- A synchronisation of DiLoCo: Shoal's and torchft's, on the same model with the same inner and outer optimizers.
- The mean of 4 MB: Shoal's, through shared memory and through gloo, and hivemind's.
- A step whose gradients are compressed: Shoal's int8 and torch's fp16 hook.
"""

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from shoal.comm.mesh import build_mesh
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
from shoal.replicas.config import ReplicaConfig
from shoal.replicas.exchange import mean_over_islands_
from shoal.trainer.loop import Trainer

MODEL = GptConfig(layers=6, hidden=384, heads=6)
"""11 million parameters."""
DATA = StdlibConfig(sequence=32, limit_bytes=1_000_000)
GLOBAL_BATCH, SEED, LR = 4, 1, 3e-4
PERIOD = 5
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9
MEAN_ELEMENTS = 2**20
"""4 MB."""
_DEADLINE_SECONDS = 60.0

Steps = Iterator[None]


def parts() -> tuple[nn.Module, Callable[..., torch.Tensor], Any]:
    """Model, loss and data, the same on every rank."""
    data = build_splits(DATA, SEED)
    torch.manual_seed(SEED)
    return build_model(MODEL, data.spec), build_loss(MODEL, data.spec), data


def own_steps(model: nn.Module, loss_of: Any, data: Any, optimizer: torch.optim.Optimizer, world: World) -> Steps:
    """A loop as people write it."""
    each = GLOBAL_BATCH // world.size
    batches = Loader(
        data.train,
        global_batch=GLOBAL_BATCH,
        micro_batch=each,
        replica=world.rank,
        num_replicas=world.size,
        seed=SEED,
    )
    while True:
        batch = batches.next().microbatches[0]
        optimizer.zero_grad()
        loss = loss_of(model(*batch.inputs), batch.targets)
        loss.backward()
        optimizer.step()
        loss.item()
        yield


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The kernel that Shoal has as well."""
    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)


def torchft_steps(world: World, folder: Path) -> Steps:
    """Torchft's DiLoCo as its own test sets it up: a lighthouse, a manager for each island, gloo between them."""
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    lighthouse = None
    if world.rank == 0:
        lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=world.size)
        publish(folder / "lighthouse", lighthouse.address())
    model, loss_of, data = parts()
    inner = adamw(model)
    outer = torch.optim.SGD(model.parameters(), lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=_DEADLINE_SECONDS)),
        load_state_dict=lambda state: None,
        state_dict=dict,
        min_replica_size=world.size,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=heard(folder / "lighthouse"),
        replica_id=f"island-{world.rank}",
        hostname="127.0.0.1",
        # With the default the steps before the first round are dropped on one island.
        init_sync=False,
    )
    with DiLoCo(manager, [model], inner, outer, sync_every=PERIOD, pin_memory=False):
        yield from own_steps(model, loss_of, data, inner, world)
    del lighthouse


def trainer_steps(world: World, plan: str) -> Steps:
    """Shoal's trainer, without a run directory."""
    model, loss_of, data = parts()
    trainer = Trainer(
        model,
        data,
        loss=loss_of,
        train=TrainConfig(steps=10**6, global_batch=GLOBAL_BATCH, seed=SEED),
        optim=OptimConfig(name="adamw", lr=LR),
        replicas=ReplicaConfig(outer_lr=OUTER_LR, outer_momentum=OUTER_MOMENTUM),
        plan=Plan.parse(plan),
        world=world,
    )
    for _ in trainer.training_steps():
        yield


def hook_steps(world: World, hook: str) -> Steps:
    """DDP with one of torch's hooks."""
    model, loss_of, data = parts()
    wrapped = DistributedDataParallel(model, process_group=world.group, gradient_as_bucket_view=True)
    if hook == "fp16":
        wrapped.register_comm_hook(world.group, default_hooks.fp16_compress_hook)
    else:
        state = powerSGD_hook.PowerSGDState(world.group, matrix_approximation_rank=2, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    yield from own_steps(wrapped, loss_of, data, adamw(model), world)


def mean_steps(world: World, *, shared: bool) -> Steps:
    """What policies average weights with."""
    channel = build_mesh(world, Plan(dp=world.size), shared=shared).replicas
    tensor = torch.full((MEAN_ELEMENTS,), float(world.rank))
    mean_over_islands_([tensor], channel)
    assert float(tensor[0]) == 0.5, "the mean of 0 and 1"
    while True:
        mean_over_islands_([tensor], channel)
        yield


def hivemind_steps(world: World, folder: Path) -> Steps:
    """Hivemind's averager with its matchmaking as short as it goes."""
    import hivemind

    first = None if world.rank == 0 else [heard(folder / "dht")]
    dht = hivemind.DHT(initial_peers=first, start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    if world.rank == 0:
        publish(folder / "dht", str(dht.get_visible_maddrs()[0]))
    averager = hivemind.averaging.DecentralizedAverager(
        averaged_tensors=[torch.full((MEAN_ELEMENTS,), float(world.rank))],
        dht=dht,
        prefix="mean",
        target_group_size=2,
        min_group_size=2,
        min_matchmaking_time=0.1,
        request_timeout=0.1,
        start=True,
    )
    averager.step(timeout=_DEADLINE_SECONDS)
    with averager.get_tensors() as (tensor,):
        assert abs(float(tensor[0]) - 0.5) < 1e-6, "the mean of 0 and 1"
    while True:
        assert averager.step(timeout=_DEADLINE_SECONDS) is not None, "no group was found"
        yield


def publish(path: Path, text: str) -> None:
    """Leave a word for the other rank."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


def heard(path: Path) -> str:
    """What rank 0 has left."""
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} was not written within {_DEADLINE_SECONDS:g} s")
        time.sleep(0.02)
    return path.read_text()


def steps_of(name: str, world: World, folder: Path) -> Steps:
    """The contender with this name."""
    return {
        "torchft": lambda: torchft_steps(world, folder),
        "shoal diloco": lambda: trainer_steps(world, f"dp=2 sync=diloco:{PERIOD}"),
        "hivemind": lambda: hivemind_steps(world, folder),
        "shoal mean": lambda: mean_steps(world, shared=True),
        "shoal mean, gloo": lambda: mean_steps(world, shared=False),
        "torch fp16": lambda: hook_steps(world, "fp16"),
        "torch powersgd": lambda: hook_steps(world, "powersgd"),
        "shoal dense": lambda: trainer_steps(world, "dp=2"),
        "shoal int8": lambda: trainer_steps(world, "dp=2 compress=int8"),
    }[name]()
