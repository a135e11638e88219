"""One process of a calibration: times what a rank does, alone and beside the others, and answers with seconds.

Started by ``calibration.py`` through a ``Pool``, with the threads that a rank would have.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore  # torch types this name only there

# The trainer with everything that a rank imports, so that resident memory is a rank's.
import shoal.trainer.loop  # noqa: F401
from shoal.comm.channel import Channel
from shoal.comm.mesh import build_mesh
from shoal.comm.world import World, join_world
from shoal.core.axes import Axis
from shoal.core.plan import Plan
from shoal.launch.environments import read_place
from shoal.launch.pool import serve
from shoal.planner.hardware.calibrate import MEETING_SIZES, SHAPES
from shoal.telemetry.memory import rss_bytes

_COPY_BYTES = 32 << 20
_FEWEST, _MOST = 3, 200
_FEWEST_BETWEEN, _MOST_BETWEEN = 10, 40
_SAMPLES_BETWEEN = 4
"""Of the block that ranks compute between two operations: some ten milliseconds."""
_TURNS = 3
_CALL_BYTES = 16 << 20
"""A size is repeated until about this much has been moved."""


def run_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """Time everything once; see ``shoal.planner.hardware.calibrate.build_machine`` for what is made of it."""
    torch.set_num_threads(job["threads"])
    size = int(os.environ["WORLD_SIZE"])
    store = FileStore(str(Path(job["folder"]) / "store"), size)
    world = join_world(read_place(os.environ), deadline_seconds=job["deadline_seconds"], store=store)
    try:
        work = _step_of_a_block()
        # Once, before memory is looked at: torch loads its kernels when they are first used, and every rank has them.
        work()
        rank_bytes = rss_bytes()
        answer: dict[str, Any] = {"rank_bytes": rank_bytes, "alone": [], "together": []}
        # In turns: what else the machine does for a while must not fall on one side only.
        for _ in range(_TURNS):
            world.barrier()
            # Alone: the others wait, and do not compute.
            answer["alone"].append(_repeat(work, job["seconds"] / _TURNS) if world.is_first else 0.0)
            world.barrier()
            answer["together"].append(_repeat(work, job["seconds"] / _TURNS))
        world.barrier()
        answer["matmuls"] = [_windows(world, _matmul(*shape), job["seconds"] / 3) for shape in SHAPES]
        answer["copy"] = {"num_bytes": _COPY_BYTES, "windows": _windows(world, _copy(), job["seconds"] / 3)}
        world.barrier()
        answer["collectives"] = [
            timed for plan in job["plans"] for timed in _time_collectives(world, Plan.parse(plan), job["sizes"])
        ]
        world.barrier()
        answer["meetings"] = [
            timed
            for plan in job["plans"]
            for timed in _time_meetings(world, Plan.parse(plan), _step_of_a_block(_SAMPLES_BETWEEN), job["seconds"])
        ]
        world.barrier()
        return answer
    finally:
        world.close()


def _repeat(work: Callable[[], object], seconds: float) -> float:
    """The median of one call, over so long."""
    work()
    taken: list[float] = []
    started = time.perf_counter()
    while len(taken) < _FEWEST or time.perf_counter() - started < seconds:
        begin = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def _windows(world: World, work: Callable[[], object], seconds: float) -> list[dict[str, float]]:
    """The mean and the best call of several windows that all processes begin together.

    The mean is what counts where processes share a core: a call that is shorter than a slice of the scheduler's has the core
    for itself, so a typical call of four processes on two cores took no longer than one of two.
    """
    work()
    found = []
    for _ in range(_TURNS):
        world.barrier()
        best, calls, started = math.inf, 0, time.perf_counter()
        now = started
        while calls < _FEWEST or now - started < seconds:
            begin, calls = now, calls + 1
            work()
            now = time.perf_counter()
            best = min(best, now - begin)
        found.append({"mean": (now - started) / calls, "best": best})
    world.barrier()
    return found


def _step_of_a_block(samples: int = 8) -> Callable[[], object]:
    """Forward and backward pass of a transformer block: the mixture of products and memory that training is."""
    block = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
    x_BLD = torch.randn(samples, 128, 128)

    def work() -> None:
        block(x_BLD).square().mean().backward()

    return work


def _matmul(rows: int, inner: int, outer: int) -> Callable[[], object]:
    left, right = torch.randn(rows, inner), torch.randn(inner, outer)
    return lambda: left @ right


def _copy() -> Callable[[], object]:
    source, target = torch.zeros(_COPY_BYTES, dtype=torch.uint8), torch.zeros(_COPY_BYTES, dtype=torch.uint8)
    return lambda: target.copy_(source)


def _time_collectives(world: World, plan: Plan, sizes: Sequence[int]) -> list[dict[str, Any]]:
    mesh = build_mesh(world, plan)
    try:
        # With tp two channels of half the ranks work side by side; without, one of all.
        channel = mesh.channel(Axis.TENSOR if plan.tp > 1 else Axis.DATA)
        found = []
        for num_bytes in sizes:
            for operation, call in _operations(channel, num_bytes).items():
                found.append(_timed(world, operation, channel.size, num_bytes, call))
            if plan.tp == 1:
                found.append(_timed(world, "send", 2, num_bytes, _message(world, num_bytes)))
        return found
    finally:
        mesh.close()


def _time_meetings(world: World, plan: Plan, work: Callable[[], object], seconds: float) -> Iterator[dict[str, Any]]:
    """A sum and a message, in a row and between passes of a block."""
    mesh = build_mesh(world, plan)
    try:
        channel = mesh.channel(Axis.TENSOR if plan.tp > 1 else Axis.DATA)
        sums = [_operations(channel, num_bytes)["all_reduce"] for num_bytes in MEETING_SIZES]
        yield {
            "operation": "all_reduce",
            "ranks": channel.size,
            "alone": [
                _timed(world, "all_reduce", channel.size, MEETING_SIZES[k], call)["seconds"]
                for k, call in enumerate(sums)
            ],
            "between": [_between(world, work, call, seconds) for call in sums],
        }
        if plan.tp == 1:
            yield {
                "operation": "send",
                "ranks": 2,
                "alone": [
                    _timed(world, "send", 2, num_bytes, _message(world, num_bytes))["seconds"]
                    for num_bytes in MEETING_SIZES
                ],
                "between": [_between_messages(world, work, num_bytes, seconds) for num_bytes in MEETING_SIZES],
            }
    finally:
        mesh.close()


def _between(world: World, work: Callable[[], object], call: Callable[[], object], seconds: float) -> float:
    """What an operation adds to ranks that compute: the time from one to the next, less what the slowest computes in it."""
    whole, own = _alternate(world, work, call, seconds)
    return max(0.0, max(whole) - max(own))


def _between_messages(world: World, work: Callable[[], object], num_bytes: int, seconds: float) -> float:
    """The same of a message: two neighbours compute by turns, each when the other's message has come."""
    peer, sent, received = world.rank ^ 1, torch.ones(num_bytes // 4), torch.empty(num_bytes // 4)
    is_second, spent = world.rank % 2 == 1, [0.0]

    def computing() -> None:
        if is_second and peer < world.size:
            _wait(dist.irecv(received, peer, group=world.group))
        begin = time.perf_counter()
        work()
        spent[0] = time.perf_counter() - begin

    def answering() -> None:
        _wait(dist.isend(sent, peer, group=world.group))
        if not is_second:
            _wait(dist.irecv(received, peer, group=world.group))

    whole, own = _alternate(world, computing, answering if peer < world.size else lambda: None, seconds, spent)
    pairs = [(first, first + 1) for first in range(0, world.size - 1, 2)]
    return statistics.median(max(0.0, (whole[first] - own[first] - own[second]) / 2) for first, second in pairs)


def _alternate(
    world: World,
    work: Callable[[], object],
    call: Callable[[], object],
    seconds: float,
    spent: list[float] | None = None,
) -> tuple[list[float], list[float]]:
    """Of every rank: the mean time of a work and a call, and of the work alone (or of what it says of itself).

    Means, without the highest and lowest tenth: a step has many meetings, and what it loses in them is their sum.
    """
    wholes, owns = [], []
    num_turns = _num_turns(world, work, seconds) if spent is None else max(_FEWEST_BETWEEN, _MOST_BETWEEN // 2)
    world.barrier()
    for _ in range(num_turns):
        begin = time.perf_counter()
        work()
        middle = time.perf_counter()
        call()
        wholes.append(time.perf_counter() - begin)
        owns.append(middle - begin if spent is None else spent[0])
    world.barrier()
    means = torch.tensor([_mean(wholes), _mean(owns)], dtype=torch.float64)
    pages = [tensor.tolist() for tensor in world.all_gather(means)]
    return [page[0] for page in pages], [page[1] for page in pages]


def _mean(values: list[float]) -> float:
    cut = len(values) // 10
    return statistics.mean(sorted(values)[cut : len(values) - cut])


def _num_turns(world: World, work: Callable[[], object], seconds: float) -> int:
    """As many as fit, the same on all ranks."""
    begin = time.perf_counter()
    work()
    longest = max(float(tensor) for tensor in world.all_gather(torch.tensor([time.perf_counter() - begin])))
    return int(min(_MOST_BETWEEN, max(_FEWEST_BETWEEN, seconds / longest)))


def _operations(channel: Channel, num_bytes: int) -> dict[str, Callable[[], object]]:
    """By the words of the traffic counter, each of so many bytes as the traffic counter counts them."""
    size, count = channel.size, num_bytes // 4
    counts = [count // size] * size
    counts[0] += count - sum(counts)
    whole, own = torch.ones(count), torch.ones(counts[channel.rank])
    parts, received = list(torch.split(torch.ones(count), counts)), list(torch.split(torch.empty(count), counts))
    into = torch.empty(count)
    # Equal parts: what a rank sends to each is what it gets from each.
    even = [part[: count // size] for part in parts]
    evenly = [part[: count // size] for part in received]
    return {
        "all_reduce": lambda: channel.all_reduce_(whole),
        "reduce_scatter": lambda: channel.reduce_scatter(whole, own, counts),
        "all_gather": lambda: channel.all_gather(own, whole, counts),
        "all_to_all": lambda: channel.all_to_all(even, evenly),
        "ring_shift": lambda: channel.ring_shift(whole, into),
    }


def _message(world: World, num_bytes: int) -> Callable[[], object]:
    """There and back between two neighbours; the time of one way is half of it. The last of an odd number has none, and rests."""
    peer, sent, received = world.rank ^ 1, torch.ones(num_bytes // 4), torch.empty(num_bytes // 4)
    if peer >= world.size:
        return lambda: None

    def call() -> None:
        if world.rank % 2 == 0:
            _wait(dist.isend(sent, peer, group=world.group), dist.irecv(received, peer, group=world.group))
        else:
            _wait(dist.irecv(received, peer, group=world.group))
            _wait(dist.isend(sent, peer, group=world.group))

    return call


def _wait(*handles: Any) -> None:
    for handle in handles:
        handle.wait()


def _timed(world: World, operation: str, ranks: int, num_bytes: int, call: Callable[[], object]) -> dict[str, Any]:
    repeats = max(_FEWEST, min(_MOST, _CALL_BYTES // num_bytes))
    call()
    world.barrier()
    taken = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    world.barrier()
    seconds = statistics.median(taken) / (2 if operation == "send" else 1)
    return {"operation": operation, "ranks": ranks, "num_bytes": num_bytes, "seconds": seconds}


def main() -> None:
    """Entry point: serves jobs."""
    serve(lambda job: run_job(job))


if __name__ == "__main__":
    main()
