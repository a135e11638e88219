"""A step of tensor parallelism on two processes, beside torch's ``parallelize_module`` and DDP on the same global batch.

python benchmarks/tensor/main.py [--rounds 21] [--steps 1]
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from shoal.comm.mesh import build_mesh
from shoal.comm.world import World
from shoal.core.axes import Axis
from shoal.core.plan import Plan
from shoal.models.config import GptConfig
from shoal.models.gpt import Gpt
from shoal.models.losses import cross_entropy
from shoal.parallel.analysis.structure import Heads, ModuleAnalysis, Split, SplitKind, Stack
from shoal.parallel.tensor.apply import apply_tensor_parallel
from shoal.parallel.tensor.vocabulary import split_cross_entropy
from shoal.testing.ranks import run_on_ranks

LAYERS, HIDDEN, HEADS, SEQUENCE, BATCH, VOCAB = 6, 256, 8, 256, 16, 256
LOCAL_COUNTS = {"heads": HEADS, "kv_heads": HEADS}
ATTENTION = {"query": SplitKind.COLUMN, "key": SplitKind.COLUMN, "value": SplitKind.COLUMN, "output": SplitKind.ROW}
FEED_FORWARD = {"gate": SplitKind.COLUMN, "up": SplitKind.COLUMN, "down": SplitKind.ROW}
Steps = Iterator[float]


def build() -> Gpt:
    torch.manual_seed(1)
    return Gpt(GptConfig(layers=LAYERS, hidden=HIDDEN, heads=HEADS), vocab=VOCAB, sequence=SEQUENCE)


def analysis() -> ModuleAnalysis:
    blocks = tuple(f"blocks.{index}" for index in range(LAYERS))
    layers = {
        **{f"attention.{k}": v for k, v in ATTENTION.items()},
        **{f"feed_forward.{k}": v for k, v in FEED_FORWARD.items()},
    }
    splits = [Split(path=f"{block}.{name}", kind=kind) for block in blocks for name, kind in layers.items()]
    splits += [Split(path="embedding", kind=SplitKind.VOCABULARY), Split(path="head", kind=SplitKind.LOGITS)]
    heads = [Heads(path=f"{b}.attention", num_heads=HEADS, num_kv_heads=HEADS, divided=LOCAL_COUNTS) for b in blocks]
    return ModuleAnalysis(stacks=(Stack(blocks=blocks, sequence_dim=1),), splits=tuple(splits), attentions=tuple(heads))


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    while True:
        tokens = torch.randint(VOCAB, (BATCH, SEQUENCE + 1), generator=generator)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def train(model: nn.Module, loss_of: Callable[[Any, Tensor], Tensor], rows: slice, finish: Callable[[], None]) -> Steps:
    """Steps of a person's own loop; each gives its loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for tokens, targets in batches():
        optimizer.zero_grad()
        loss = loss_of(model(tokens[rows]), targets[rows])
        loss.backward()
        finish()
        optimizer.step()
        yield loss.item()


def ddp_steps(world: World) -> Steps:
    model = DistributedDataParallel(build(), process_group=world.group, gradient_as_bucket_view=True)
    share = BATCH // world.size
    return train(model, cross_entropy, slice(world.rank * share, (world.rank + 1) * share), lambda: None)


def shoal_steps(world: World, *, sequence_parallel: bool, shared: bool = True) -> Steps:
    mesh = build_mesh(world, Plan(dp=1, tp=world.size), shared=shared)
    model, channel = build(), mesh.channel(Axis.TENSOR)
    layout = apply_tensor_parallel(model, analysis=analysis(), mesh=mesh, sequence_parallel=sequence_parallel)
    partial = [parameter for name, parameter in model.named_parameters() if name in layout.partial]

    def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
        return split_cross_entropy(scores, targets, channel=channel, vocab=VOCAB)

    def finish() -> None:
        if partial:
            # One call for all of them: each is a few numbers.
            flat = channel.all_reduce_(
                torch.cat([parameter.grad.reshape(-1) for parameter in partial if parameter.grad is not None])
            )
            for parameter, part in zip(partial, flat.split([p.numel() for p in partial]), strict=True):
                parameter.grad = part.view_as(parameter)

    return train(model, loss_of, slice(None), finish)


def torch_steps(world: World) -> Steps:
    """``parallelize_module`` as its tutorial shows it: column and row layers, the scores gathered."""
    model = build()
    # Its optimizer takes one kind of tensor only, so norms and embeddings become DTensors by a plan as well.
    styles: dict[str, Any] = {"head": ColwiseParallel(output_layouts=Replicate())}
    for index in range(LAYERS):
        for name, kind in (
            *((f"attention.{k}", v) for k, v in ATTENTION.items()),
            *((f"feed_forward.{k}", v) for k, v in FEED_FORWARD.items()),
        ):
            styles[f"blocks.{index}.{name}"] = ColwiseParallel() if kind is SplitKind.COLUMN else RowwiseParallel()
        attention = model.blocks[index].attention
        attention.heads, attention.kv_heads = HEADS // world.size, HEADS // world.size
    parallelize_module(model, init_device_mesh("cpu", (world.size,)), styles)
    split = [parameter for parameter in model.parameters() if hasattr(parameter, "placements")]
    whole = [parameter for parameter in model.parameters() if not hasattr(parameter, "placements")]
    optimizers = [torch.optim.AdamW(group, lr=1e-3, fused=True) for group in (split, whole)]
    for tokens, targets in batches():
        for optimizer in optimizers:
            optimizer.zero_grad()
        scores = model(tokens)
        loss = F.cross_entropy(scores.flatten(0, 1), targets.flatten())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        yield loss.item()


def measure(world: World, rounds: int, steps: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds per step of each contender in each round, and their first losses; they take turns, and the order turns."""
    torch.set_num_threads(1)
    contenders = {
        "ddp": ddp_steps(world),
        "shoal tp": shoal_steps(world, sequence_parallel=False),
        "shoal tp sp": shoal_steps(world, sequence_parallel=True),
        "shoal tp over gloo": shoal_steps(world, sequence_parallel=False, shared=False),
        "parallelize_module": torch_steps(world),
    }
    losses = {name: [next(steps_of) for _ in range(2)] for name, steps_of in contenders.items()}
    names, found = list(contenders), {name: [] for name in contenders}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            world.barrier()
            started = time.perf_counter()
            for _ in range(steps):
                next(contenders[name])
            found[name].append((time.perf_counter() - started) / steps)
    return found, losses


def summarise(found: dict[str, list[float]]) -> dict[str, Any]:
    """Medians in milliseconds, and the median over rounds of each one's ratio to DDP in the same round."""
    return {
        name: {
            "ms": round(statistics.median(values) * 1e3, 1),
            "to_ddp": round(statistics.median(a / b for a, b in zip(values, found["ddp"], strict=True)), 3),
            "to_ddp_by_round": [round(a / b, 3) for a, b in zip(values, found["ddp"], strict=True)],
        }
        for name, values in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--steps", type=int, default=1)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    answers = run_on_ranks(measure, 2, options.rounds, options.steps, deadline_seconds=900.0)
    results = {
        "date": str(date.today()),
        "torch": torch.__version__,
        "cpu": platform.processor() or "unknown",
        "cores": os.cpu_count(),
        "load_before": round(load, 1),
        "workload": f"gpt, {LAYERS} layers of {HIDDEN}, sequence {SEQUENCE}, global batch {BATCH}, two processes",
        "step": summarise(answers[0][0]),
        "first_losses": answers[0][1],
    }
    print(json.dumps(results, indent=2))
    target = Path(__file__).parent / "results" / f"{date.today()}.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(results, indent=2) + "\n")
    print(f"written to {target}", file=sys.stderr)


if __name__ == "__main__":
    main()
