"""A pipeline step on two processes beside ``torch.distributed.pipelining`` with the same schedule, and beside its own prediction.

python benchmarks/pipeline/main.py [--rounds 9]
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from shoal.comm.ledger import Ledger
from shoal.comm.world import World
from shoal.models.build import cross_entropy
from shoal.models.config import GptConfig
from shoal.models.gpt import Gpt
from shoal.parallel.config import ParallelConfig
from shoal.parallel.find.search import find_anatomy
from shoal.pipeline.cut import Chain
from shoal.pipeline.mail import Mail
from shoal.pipeline.runtime import Runtime
from shoal.pipeline.units import find_units
from shoal.schedules.action import Kind
from shoal.schedules.catalogue import make_schedule
from shoal.schedules.pricing import Costs, price
from shoal.testing.ranks import run_on_ranks

LAYERS, HIDDEN, HEADS, SEQUENCE, VOCAB = 8, 192, 6, 128, 256
MICROBATCHES, SAMPLES = 8, 2
BESIDE_TORCH = ("gpipe", "1f1b", "interleaved")
ALONE = ("zb-h1", "zbv", "chimera")


def build() -> Gpt:
    torch.manual_seed(1)
    return Gpt(GptConfig(layers=LAYERS, hidden=HIDDEN, heads=HEADS), vocab=VOCAB, sequence=SEQUENCE)


def tokens() -> Tensor:
    return torch.randint(VOCAB, (MICROBATCHES * SAMPLES, SEQUENCE + 1), generator=torch.Generator().manual_seed(2))


class Part(nn.Module):
    """Some blocks of a gpt, written by hand as torch's stages are."""

    def __init__(self, whole: Gpt, blocks: range, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.embedding = whole.embedding if is_first else None
        self.blocks = nn.ModuleList(whole.blocks[index] for index in blocks)
        self.norm, self.head = (whole.norm, whole.head) if is_last else (None, None)
        self.rotary = whole.rotary

    def forward(self, x: Tensor) -> Tensor:
        """Tokens or the stream in, the stream or scores out."""
        x = self.embedding(x) if self.embedding is not None else x
        for block in self.blocks:
            x = block(x, self.rotary)
        return self.head(self.norm(x)) if self.head is not None else x


def torch_step(world: World, name: str) -> Callable[[], None]:
    """A step of torch's own schedule, with as many stages as ours has."""
    chunks = 2 if name == "interleaved" else 1
    num_stages, whole = chunks * world.size, build()
    each = LAYERS // num_stages
    stages = [
        PipelineStage(
            Part(
                whole,
                range(index * each, (index + 1) * each),
                is_first=index == 0,
                is_last=index == num_stages - 1,
            ),
            index,
            num_stages,
            world.device,
            group=world.group,
        )
        for index in range(world.rank, num_stages, world.size)
    ]
    kinds: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}
    schedule = kinds[name](stages if chunks > 1 else stages[0], MICROBATCHES, loss_fn=cross_entropy)
    inputs, targets = tokens()[:, :-1].contiguous(), tokens()[:, 1:].contiguous()
    is_last = world.rank == (num_stages - 1) % world.size

    def step() -> None:
        for stage in stages:
            stage.submod.zero_grad()
        given = (inputs,) if world.rank == 0 else ()
        schedule.step(*given, target=targets if is_last else None)

    return step


class Feed:
    """The same microbatches for our runtime."""

    def __init__(self) -> None:
        whole = tokens()
        self.parts = whole.split(SAMPLES)

    def inputs(self, microbatch: int) -> tuple[Tensor]:
        """See ``runtime.Feed``, as for the others."""
        return (self.parts[microbatch][:, :-1].contiguous(),)

    def kind(self, microbatch: int) -> str:
        """All of one shape."""
        return "microbatch"

    def drawing(self, microbatch: int) -> Any:
        """Nothing is drawn."""
        return nullcontext()

    def loss(self, output: Tensor, microbatch: int) -> Tensor:
        """A share of the mean."""
        return cross_entropy(output, self.parts[microbatch][:, 1:].contiguous()) / MICROBATCHES


def build_runtime(world: World, name: str) -> tuple[Runtime, dict[str, nn.Parameter]]:
    schedule = make_schedule(name, ranks=world.size, microbatches=MICROBATCHES)
    model, example = build(), (tokens()[:SAMPLES, :-1].contiguous(),)
    units = find_units(model, example, find_anatomy(model, example, ParallelConfig()))
    blocks = [index for index, unit in enumerate(units) if unit.path.startswith("blocks.")]
    num_stages = schedule.grid.num_stages
    starts = [0, *(blocks[stage * LAYERS // num_stages] for stage in range(1, num_stages))]
    chain = Chain(model, units, starts)
    chain.settle(example)
    own = chain.keep(schedule.grid.stages_of(world.rank))
    mail = Mail(world.group, ledger=Ledger(), device=world.device, deadline_seconds=60.0)
    return Runtime(chain, schedule, rank=world.rank, mail=mail), own


def shoal_step(world: World, name: str) -> tuple[Callable[[], None], Runtime]:
    runtime, own = build_runtime(world, name)
    feed = Feed()

    def step() -> None:
        for parameter in own.values():
            parameter.grad = None
        runtime.step(feed)

    return step, runtime


def timed_actions(runtime: Runtime, step: Callable[[], None]) -> dict[str, list[float]]:
    """Compute seconds of each kind of action by stage, without what it waits: taking and giving are not counted."""
    seconds: dict[str, list[float]] = defaultdict(list)
    waited = [0.0]
    for name in ("_take", "_give"):
        inner = getattr(runtime, name)

        def clocked(*args: Any, inner: Any = inner) -> Any:
            started = time.perf_counter()
            try:
                return inner(*args)
            finally:
                waited[0] += time.perf_counter() - started

        setattr(runtime, name, clocked)
    for name in ("_forward", "_backward", "_weight"):
        inner = getattr(runtime, name)

        def noted(desk: Any, action: Any, inner: Any = inner) -> None:
            waited[0] = 0.0
            started = time.perf_counter()
            inner(desk, action)
            seconds[f"{action.stage}{action.kind}"].append(time.perf_counter() - started - waited[0])

        setattr(runtime, name, noted)
    for _ in range(3):
        step()
    for name in ("_take", "_give", "_forward", "_backward", "_weight"):
        delattr(runtime, name)
    return dict(seconds)


def race(world: World, rounds: int) -> dict[str, Any]:
    """Seconds per step of each contender, taking turns; and what each action takes."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name in (*BESIDE_TORCH, *ALONE):
        ours, runtime = shoal_step(world, name)
        contenders = {"shoal": ours}
        if name in BESIDE_TORCH:
            contenders["torch"] = torch_step(world, name)
        for step in contenders.values():
            step()
            step()
        seconds: dict[str, list[float]] = {who: [] for who in contenders}
        for turn in range(rounds):
            order = list(contenders.items())
            for who, step in order if turn % 2 else reversed(order):
                world.barrier()
                started = time.perf_counter()
                step()
                world.barrier()
                seconds[who].append(time.perf_counter() - started)
        found[name] = {"seconds": seconds, "actions": timed_actions(runtime, ours)}
    return found


def predict(name: str, answers: list[dict[str, Any]]) -> tuple[float, float]:
    """The step that the schedule prices at measured costs, and its share of idle time."""
    medians = {key: statistics.median(values) for answer in answers for key, values in answer[name]["actions"].items()}
    schedule = make_schedule(name, ranks=2, microbatches=MICROBATCHES)

    class Measured(Costs):
        def of(self, cell: Any) -> float:
            return sum(medians[f"{action.stage}{Kind(action.kind)}"] for action in cell)

    timeline = price(schedule, Measured())
    return timeline.makespan, timeline.bubble


def summarise(answers: list[dict[str, Any]]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for name, answer in answers[0].items():
        seconds = answer["seconds"]
        makespan, bubble = predict(name, answers)
        ours = statistics.median(seconds["shoal"])
        busy = makespan * (1 - bubble)
        row = {"ms": round(ours * 1e3, 1), "predicted_ms": round(makespan * 1e3, 1)}
        row |= {"bubble": round(1 - busy / ours, 3), "predicted_bubble": round(bubble, 3)}
        if "torch" in seconds:
            ratios = [one / other for one, other in zip(seconds["shoal"], seconds["torch"], strict=True)]
            row |= {"torch_ms": round(statistics.median(seconds["torch"]) * 1e3, 1)}
            row |= {"to_torch": round(statistics.median(ratios), 3), "to_torch_by_round": [round(r, 3) for r in ratios]}
        rows[name] = row
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    answers = run_on_ranks(race, 2, options.rounds, deadline_seconds=900.0)
    results = {
        "date": str(date.today()),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "load_before": round(load, 1),
        "workload": f"gpt, {LAYERS} layers of {HIDDEN}, sequence {SEQUENCE}, {MICROBATCHES} microbatches of {SAMPLES}",
        "step": summarise(answers),
    }
    for name, row in results["step"].items():
        print(f"{name:<13}", *(f"{key} {value}" for key, value in row.items() if not key.endswith("round")))
    target = Path(__file__).parent / "results" / f"{date.today()}.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(results, indent=2) + "\n")
    print(f"written to {target}", file=sys.stderr)


if __name__ == "__main__":
    main()
