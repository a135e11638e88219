"""Samples per second without a flush beside 1F1B with one: the same model, microbatches and optimizer, taking turns.

predicted: what the removed bubble is worth, which is both schedules priced at the same times: the medians of 1F1B's actions in
that round, without updates. with updates: priced at each contender's own actions, in which its updates and copies of weights are.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from bubble import Key, at_medians, medians_of, spans_of, transfer_of
from workload import SAMPLES, Feed, Rank, Record, build_rank

from shoal.comm.world import World
from shoal.pipeline.runtime import Runtime
from shoal.pipeline.versions import VersionRule, Versions
from shoal.schedules.catalogue import make_schedule
from shoal.schedules.pricing import Costs, price
from shoal.schedules.schedule import Action

MICROBATCHES, STEPS = 4, 6
"""Of a step and of a window. Few microbatches, so that the bubble is large enough to be seen."""
NAMES = ("pipedream", "pipedream-vsync", "pipedream-2bw")
UPDATE = "update"
Window = Callable[[], None]


def make(name: str) -> Any:
    """A window's schedule; that of one step for 1F1B, whose windows have a flush after every step."""
    return make_schedule(name, ranks=2, microbatches=MICROBATCHES, steps=1 if name == "1f1b" else STEPS)


def build_optimizer(rank: Rank) -> torch.optim.Optimizer:
    """As the trainer builds it."""
    return torch.optim.AdamW(list(rank.own.values()), lr=1e-4, fused=True)


def flushed(world: World) -> tuple[Window, Record]:
    """A window of steps of 1F1B."""
    schedule, record, feed = make("1f1b"), Record(), Feed(MICROBATCHES)
    rank = build_rank(world, schedule)
    optimizer = build_optimizer(rank)
    runtime = Runtime(rank.chain, schedule, rank=world.rank, p2p=rank.p2p, observe=record)

    def window() -> None:
        for _ in range(STEPS):
            rank.let_go_of_gradients()
            runtime.step(feed)
            begin = time.perf_counter()
            optimizer.step()
            record.taken.append((UPDATE, begin, 0.0, time.perf_counter()))

    return window, record


def flowing(world: World, name: str) -> tuple[Window, Record]:
    """The same number of microbatches without a flush."""
    schedule, record, feed = make(name), Record(), Feed(MICROBATCHES if name == "pipedream-2bw" else 1)
    rank = build_rank(world, schedule)
    optimizer = build_optimizer(rank)
    rule = VersionRule(updates=schedule.updates, num_stages=world.size, accumulate=schedule.accumulate)
    versions = Versions(rank.own, rule, stage=world.rank)
    runtime = Runtime(
        rank.chain,
        schedule,
        rank=world.rank,
        p2p=rank.p2p,
        versions=versions,
        update=lambda microbatch: optimizer.step(),
        observe=record,
    )
    first = 0

    def window() -> None:
        nonlocal first
        runtime.step(feed, first=first)
        first += STEPS * MICROBATCHES

    return window, record


def race(world: World, rounds: int) -> dict[str, Any]:
    """Seconds per window of each contender, taking turns, and its actions."""
    torch.set_num_threads(1)
    contenders = {"1f1b": flushed(world)} | {name: flowing(world, name) for name in NAMES}
    found: dict[str, Any] = {name: {"seconds": [], "taken": []} for name in contenders}
    # The first round warms up.
    for turn in range(rounds + 1):
        order = list(contenders.items())
        turned = order[turn % len(order) :] + order[: turn % len(order)]
        for name, (window, record) in turned:
            world.barrier()
            started = time.perf_counter()
            window()
            world.barrier()
            seconds, taken = time.perf_counter() - started, record.give()
            if turn > 0:
                found[name]["seconds"].append(seconds)
                found[name]["taken"].append(taken)
    return found


def summarise(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """One row for each schedule."""
    samples = STEPS * MICROBATCHES * SAMPLES
    base = answers[0]["1f1b"]["seconds"]
    rows: dict[str, Any] = {"1f1b": {"samples_per_second": round(samples / statistics.median(base), 2)}}
    for name in NAMES:
        seconds = answers[0][name]["seconds"]
        ratios = [one / other for one, other in zip(base, seconds, strict=True)]
        predicted, with_updates = [], []
        for turn in range(len(seconds)):
            alone, own = _predict(name, [{who: answer[who]["taken"][turn] for who in answer} for answer in answers])
            predicted.append(alone)
            with_updates.append(own)
        rows[name] = {
            "samples_per_second": round(samples / statistics.median(seconds), 2),
            "to_1f1b": round(statistics.median(ratios), 3),
            "predicted": round(statistics.median(predicted), 3),
            "with_updates": round(statistics.median(with_updates), 3),
            "to_1f1b_by_round": [round(ratio, 3) for ratio in ratios],
            "predicted_by_round": [round(value, 3) for value in predicted],
        }
    return rows


def _predict(name: str, ranks: list[dict[str, Any]]) -> tuple[float, float]:
    """How many times 1F1B's throughput, by the removed bubble alone and with each one's own times."""
    with_flush, without = make("1f1b"), make(name)
    steps = [_steps(rank["1f1b"]) for rank in ranks]
    updates = [end - begin for what, begin, _, end in ranks[0]["1f1b"] if what == UPDATE]
    # One step's actions have the names of another's: they are priced one by one.
    flushes, seconds = 0.0, []
    pooled: dict[Key, list[float]] = {}
    for step in zip(*steps, strict=True):
        spans = spans_of(list(step))
        transfer = transfer_of(with_flush, spans)
        seconds.append(transfer)
        flushes += price(with_flush, _own(spans, transfer)).makespan
        for key, value in medians_of(with_flush, spans).items():
            pooled.setdefault(key, []).append(value)
    medians = {key: statistics.median(values) for key, values in pooled.items()}
    transfer = statistics.median(seconds)
    one, other = (
        price(schedule, at_medians(schedule, medians, transfer)).makespan for schedule in (with_flush, without)
    )
    spans = spans_of([rank[name] for rank in ranks])
    own = price(without, _own(spans, transfer_of(without, spans))).makespan
    return STEPS * one / other, (flushes + sum(updates)) / own


def _own(spans: dict[Action, Any], transfer: float) -> Costs:
    return Costs(measured={action: span.seconds for action, span in spans.items()}, transfer=transfer)


def _steps(taken: list[Any]) -> list[list[Any]]:
    """A window's record, cut at its updates."""
    steps: list[list[Any]] = [[]]
    for entry in taken:
        if entry[0] == UPDATE:
            steps.append([])
        else:
            steps[-1].append(entry)
    return steps[:-1]
