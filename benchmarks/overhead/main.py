"""What Shoal's loop adds to a step: microseconds over a bare PyTorch loop, with Lightning Fabric and accelerate beside it.

python benchmarks/overhead/main.py [--rounds 80] [--steps 25] [--to FILE]
"""

import argparse
import importlib.util
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shoal.comm.world import World, join_world
from shoal.core.place import Place
from shoal.data.build import build_splits
from shoal.data.config import SyntheticConfig
from shoal.engine.config import TrainConfig
from shoal.library.run import Run
from shoal.models.build import build_model
from shoal.models.config import GptConfig
from shoal.models.losses import build_loss
from shoal.optim.config import OptimConfig
from shoal.telemetry.statusboard import Heartbeat, StatusBoard
from shoal.testing.ranks import run_on_ranks
from shoal.trainer.loop import Trainer

GLOBAL_BATCH = 8
MODEL = GptConfig(layers=1, hidden=64, heads=4)
DATA = SyntheticConfig(kind="tokens", samples=4096, sequence=16, vocab=256)
LR = 1e-3


def parts() -> tuple[nn.Module, Callable[..., torch.Tensor], object]:
    data = build_splits(DATA, 1)
    torch.manual_seed(1)
    return build_model(MODEL, data.spec), build_loss(MODEL, data.spec), data


def bare_steps(world: World) -> Iterator[None]:
    """What a person would write: no norm, no checks, no records, the loss read once a step."""
    model, loss_of, data = parts()
    if world.group is not None:
        model = DistributedDataParallel(model, process_group=world.group, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)
    share = GLOBAL_BATCH // world.size
    step = 0
    while True:
        start = (step * GLOBAL_BATCH + world.rank * share) % (len(data.train) - share)
        items = data.train.collate(range(start, start + share))
        optimizer.zero_grad()
        loss = loss_of(model(*items.inputs), items.targets)
        loss.backward()
        optimizer.step()
        loss.item()
        step += 1
        yield


def fabric_steps(world: World, folder: Path) -> Iterator[None]:
    """Fabric with its CSV logger, one row a step, as its guide shows."""
    from lightning_fabric import Fabric
    from lightning_fabric.loggers import CSVLogger

    logger = CSVLogger(root_dir=str(folder / "fabric"))
    fabric = Fabric(accelerator="cpu", devices=world.size, strategy="ddp" if world.size > 1 else "auto", loggers=logger)
    fabric.launch()
    assert fabric.world_size == world.size, f"Fabric sees {fabric.world_size} processes of {world.size}"
    model, loss_of, data = parts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)
    model, optimizer = fabric.setup(model, optimizer)
    share = GLOBAL_BATCH // world.size
    step = 0
    while True:
        start = (step * GLOBAL_BATCH + world.rank * share) % (len(data.train) - share)
        items = data.train.collate(range(start, start + share))
        optimizer.zero_grad()
        loss = loss_of(model(*items.inputs), items.targets)
        fabric.backward(loss)
        optimizer.step()
        fabric.log_dict({"loss": loss.item(), "lr": LR, "step": step}, step=step)
        step += 1
        yield


def shoal_steps(world: World, folder: Path) -> Iterator[None]:
    """The trainer as a run has it: events, TensorBoard, the board with its heartbeat, the norm, the checks."""
    model, loss_of, data = parts()
    board = StatusBoard.create(1)
    trainer = Trainer(
        model,
        data,
        loss=loss_of,
        train=TrainConfig(steps=10**9, global_batch=GLOBAL_BATCH),
        optim=OptimConfig(name="adamw", lr=LR),
        run_dir=folder / f"shoal-{world.rank}",
        rank_status=board.of_rank(0),
        world=world,
    )
    heartbeat = Heartbeat(board.of_rank(0))
    yield from (None for _ in trainer.training_steps())
    heartbeat.stop()


def library_steps(world: World, folder: Path) -> Iterator[None]:
    """A script's own loop by ``shoal.Run``, with events and TensorBoard: no norm, as the bare loop has none."""
    model, loss_of, data = parts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)
    run = Run(plan=f"dp={world.size}", seed=1, run_dir=folder / f"library-{world.rank}", world=world).start()
    loader = run.loader(data, global_batch=GLOBAL_BATCH)
    model, optimizer = run.setup(model, optimizer, loss=loss_of)
    for batch in loader.steps(10**9):
        loss = run.forward_backward(batch)
        optimizer.step()
        run.log(loss=loss)
        yield


def accelerate_steps(world: World) -> Iterator[None]:
    """The same loop by Hugging Face accelerate, without a tracker."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == world.size, f"accelerate sees {accelerator.num_processes} of {world.size}"
    model, loss_of, data = parts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    share = GLOBAL_BATCH // world.size
    step = 0
    while True:
        start = (step * GLOBAL_BATCH + world.rank * share) % (len(data.train) - share)
        items = data.train.collate(range(start, start + share))
        optimizer.zero_grad()
        loss = loss_of(model(*items.inputs), items.targets)
        accelerator.backward(loss)
        optimizer.step()
        loss.item()
        step += 1
        yield


def measure(world: World, rounds: int, steps: int, folder: str) -> dict[str, list[float]]:
    """Seconds per step of each contender in each round; they take turns, and the order turns with them."""
    torch.set_num_threads(1)
    where = Path(folder)
    contenders = {"bare": bare_steps(world), "shoal": shoal_steps(world, where), "library": library_steps(world, where)}
    if importlib.util.find_spec("accelerate") is not None:
        contenders["accelerate"] = accelerate_steps(world)
    if importlib.util.find_spec("lightning_fabric") is not None:
        contenders["fabric"] = fabric_steps(world, where)
    for steps_of in contenders.values():
        for _ in range(30):
            next(steps_of)
    names, found = list(contenders), {name: [] for name in contenders}
    for turn in range(rounds):
        first = turn % len(names)
        order = names[first:] + names[:first]
        for name in order:
            world.barrier()
            started = time.perf_counter()
            for _ in range(steps):
                next(contenders[name])
            found[name].append((time.perf_counter() - started) / steps)
    return found


def measure_on_rank(world: World, rounds: int, steps: int, folder: str) -> dict[str, list[float]]:
    # As torchrun says it: Fabric and accelerate find by these that they are several, and then use the group that there is.
    os.environ.update(
        TORCHELASTIC_RUN_ID="overhead",
        RANK=str(world.rank),
        WORLD_SIZE=str(world.size),
        LOCAL_RANK=str(world.rank),
        GROUP_RANK="0",
        LOCAL_WORLD_SIZE=str(world.size),
        MASTER_ADDR="127.0.0.1",
    )
    os.environ.setdefault("MASTER_PORT", "29500")
    return measure(world, rounds, steps, folder)


def summarise(found: dict[str, list[float]]) -> dict[str, float]:
    """Medians in microseconds, and the median over rounds of what each adds to the bare loop in the same round."""
    summary = {f"{name}_us": statistics.median(values) * 1e6 for name, values in found.items()}
    for name in [name for name in found if name != "bare"]:
        extra = [(mine - bare) * 1e6 for mine, bare in zip(found[name], found["bare"], strict=True)]
        summary[f"{name}_adds_us"] = statistics.median(extra)
        quarters = statistics.quantiles(extra, n=4)
        summary[f"{name}_adds_us_quartiles"] = [quarters[0], quarters[2]]
        summary[f"{name}_ratio"] = summary[f"{name}_us"] / summary["bare_us"]
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=80)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--to", type=Path, default=Path(__file__).parent / "results" / f"{date.today()}.json")
    options = parser.parse_args()
    for name, module in (("Fabric", "lightning_fabric"), ("accelerate", "accelerate")):
        if importlib.util.find_spec(module) is None:
            print(f"{name} is not installed and is left out; pip install 'shoal[bench]' has it", file=sys.stderr)
    results: dict[str, object] = {
        "date": str(date.today()),
        "torch": torch.__version__,
        "cpu": platform.processor() or "unknown",
    }
    with tempfile.TemporaryDirectory() as folder:
        alone = measure(join_world(Place(), deadline_seconds=60), options.rounds, options.steps, folder)
        results["one process"] = summarise(alone)
    with tempfile.TemporaryDirectory() as folder:
        both = run_on_ranks(measure_on_rank, 2, options.rounds, options.steps, folder, deadline_seconds=600.0)
        results["two processes"] = summarise(both[0])
    print(json.dumps(results, indent=2))
    options.to.write_text(json.dumps(results, indent=2) + "\n")
    print(f"written to {options.to}", file=sys.stderr)


if __name__ == "__main__":
    main()
