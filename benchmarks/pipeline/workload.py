"""The model, the microbatches, and one step of them: by Shoal's runtime and by ``torch.distributed.pipelining``."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from shoal.comm.trafficcounter import TrafficCounter
from shoal.comm.world import World
from shoal.models.config import GptConfig
from shoal.models.gpt import Gpt
from shoal.models.losses import cross_entropy
from shoal.parallel.analysis.analyse import analyse_module
from shoal.parallel.analysis.structure import ParallelConfig
from shoal.pipeline.cut import StagedModule
from shoal.pipeline.p2p import PointToPoint
from shoal.pipeline.runtime import Runtime
from shoal.pipeline.units import find_units
from shoal.schedules.schedule import Action, Schedule

LAYERS, HIDDEN, HEADS, SEQUENCE, VOCAB = 8, 192, 6, 128, 256
MICROBATCHES, SAMPLES = 8, 2
WORKLOAD = f"gpt, {LAYERS} layers of {HIDDEN}, sequence {SEQUENCE}, {MICROBATCHES} microbatches of {SAMPLES}"
TORCH_SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
}

Taken = tuple[str, float, float, float]
"""An action, when it began, how long it waited, when it ended."""


def build() -> Gpt:
    """The model, the same on every rank."""
    torch.manual_seed(1)
    return Gpt(GptConfig(layers=LAYERS, hidden=HIDDEN, heads=HEADS), vocab=VOCAB, sequence=SEQUENCE)


def tokens() -> Tensor:
    """Of one step."""
    return torch.randint(VOCAB, (MICROBATCHES * SAMPLES, SEQUENCE + 1), generator=torch.Generator().manual_seed(2))


class Feed:
    """The microbatches for our runtime; a window of several steps goes through them again."""

    def __init__(self, num_in_step: int = MICROBATCHES) -> None:
        self.parts = tokens().split(SAMPLES)
        self.num_in_step = num_in_step

    def inputs(self, microbatch: int) -> tuple[Tensor]:
        """See ``runtime.Feed``, as for the others."""
        return (self._part(microbatch)[:, :-1].contiguous(),)

    def kind(self, microbatch: int) -> str:
        """All of one shape."""
        return "microbatch"

    def drawing(self, microbatch: int) -> Any:
        """Nothing is drawn."""
        return nullcontext()

    def returning(self, microbatch: int) -> None:
        """See ``Feed``."""

    def loss(self, output: Tensor, microbatch: int) -> Tensor:
        """A share of the mean."""
        return cross_entropy(output, self._part(microbatch)[:, 1:].contiguous()) / self.num_in_step

    def _part(self, microbatch: int) -> Tensor:
        return self.parts[microbatch % len(self.parts)]


@dataclass
class Rank:
    """What a rank has of the model, for any number of runtimes over it."""

    chain: StagedModule
    own: dict[str, nn.Parameter]
    p2p: PointToPoint

    def let_go_of_gradients(self) -> None:
        """As before every step."""
        for parameter in self.own.values():
            parameter.grad = None


def cut(schedule: Schedule) -> StagedModule:
    """The model in as many stages of equally many blocks as a schedule has."""
    model, example = build(), (tokens()[:SAMPLES, :-1].contiguous(),)
    units = find_units(model, example, analyse_module(model, example, ParallelConfig()))
    blocks = [index for index, unit in enumerate(units) if unit.path.startswith("blocks.")]
    num_stages = schedule.grid.num_stages
    starts = [0, *(blocks[stage * LAYERS // num_stages] for stage in range(1, num_stages))]
    chain = StagedModule(model, units, starts)
    chain.settle(example)
    return chain


def build_rank(world: World, schedule: Schedule) -> Rank:
    """This rank's stages."""
    chain = cut(schedule)
    own = chain.keep(schedule.grid.stages_of(world.rank))
    p2p = PointToPoint(world.group, traffic=TrafficCounter(), device=world.device, deadline_seconds=60.0)
    return Rank(chain, own, p2p)


class Record:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.taken: list[Taken] = []

    def __call__(self, action: Action, begin: float, waited: float, end: float) -> None:
        """See ``runtime.Observe``."""
        self.taken.append((str(action), begin, waited, end))

    def give(self) -> list[Taken]:
        """What came since the last time."""
        given, self.taken = self.taken, []
        return given


def shoal_step(world: World, schedule: Schedule) -> tuple[Callable[[], None], Record]:
    """A step of ours, and the record of its actions."""
    rank, feed, record = build_rank(world, schedule), Feed(), Record()
    runtime = Runtime(rank.chain, schedule, rank=world.rank, p2p=rank.p2p, observe=record)

    def step() -> None:
        rank.let_go_of_gradients()
        runtime.step(feed)

    return step, record


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

    def part(index: int) -> Part:
        blocks = range(index * each, (index + 1) * each)
        return Part(whole, blocks, is_first=index == 0, is_last=index == num_stages - 1)

    stages = [
        PipelineStage(part(index), index, num_stages, world.device, group=world.group)
        for index in range(world.rank, num_stages, world.size)
    ]
    schedule = TORCH_SCHEDULES[name](stages if chunks > 1 else stages[0], MICROBATCHES, loss_fn=cross_entropy)
    inputs, targets = tokens()[:, :-1].contiguous(), tokens()[:, 1:].contiguous()
    is_last = world.rank == (num_stages - 1) % world.size

    def step() -> None:
        for stage in stages:
            stage.submod.zero_grad()
        given = (inputs,) if world.rank == 0 else ()
        schedule.step(*given, target=targets if is_last else None)

    return step
