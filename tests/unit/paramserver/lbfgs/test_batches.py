"""Work units of a batch: who gets which, what is counted, and how long the whole takes when one worker is slow."""

import heapq
import itertools
import random

import pytest
import torch

from shoal.core.errors import RequestError
from shoal.paramserver.lbfgs.batches import BatchQueue, InOrder, cut_batch
from shoal.paramserver.lbfgs.vectors import GradientSum


@pytest.mark.parametrize(
    ("num_samples", "num_workers", "sizes"),
    [(16, 1, [2] * 8), (10, 1, [1, 1, 1, 2, 1, 1, 1, 2]), (3, 4, [1, 1, 1]), (64, 2, [4] * 16)],
)
def test_a_batch_is_cut_evenly_and_in_order(num_samples, num_workers, sizes):
    units = cut_batch(num_samples, num_workers)
    assert [len(unit) for unit in units] == sizes
    ends = [0, *(end for unit in units for end in (unit.start, unit.stop)), num_samples]
    assert ends[::2] == ends[1::2]


@pytest.mark.parametrize("wrong", [(0, 1, 8), (8, 0, 8), (8, 1, 0)])
def test_a_batch_that_cannot_be_cut_is_refused(wrong):
    with pytest.raises(RequestError, match="each must be at least 1"):
        cut_batch(wrong[0], wrong[1], per_worker=wrong[2])


def new(unit):
    return unit, False


def take(batch_queue, worker, now):
    """What a worker is given, and whether somebody else computes it already."""
    before = batch_queue.num_backups
    unit = batch_queue.take(worker, now)
    return None if unit is None else (unit, batch_queue.num_backups > before)


def backup(unit):
    return unit, True


# Each row: what happens, in order, and what it must answer.
TABLE = {
    "in order": [("take", "a", new(0)), ("take", "b", new(1)), ("finish", "b", 1, True), ("take", "b", new(2))],
    "the one that is out longest is given out again": [
        ("take", "a", new(0)), ("take", "b", new(1)), ("take", "c", new(2)), ("finish", "c", 2, True),
        ("take", "c", backup(0)), ("finish", "c", 0, True), ("take", "c", backup(1)), ("finish", "b", 1, True),
        ("finish", "a", 0, False), ("finish", "c", 1, False), ("done",),
    ],
    "no third copy, and none for oneself": [
        ("take", "a", new(0)), ("take", "a", new(1)), ("take", "a", new(2)), ("take", "a", None), ("take", "b", backup(0)),
        ("take", "b", backup(1)), ("take", "c", backup(2)), ("take", "c", None),
    ],
    "a death returns what nobody else computes": [
        ("take", "a", new(0)), ("take", "b", new(1)), ("take", "a", new(2)), ("take", "b", backup(0)), ("lose", "a", (2,)),
        ("take", "b", new(2)), ("finish", "b", 0, True), ("finish", "b", 2, True), ("finish", "b", 1, True), ("done",),
    ],
    "the last holder of a backup dies too": [
        ("take", "a", new(0)), ("take", "a", new(1)), ("take", "a", new(2)), ("take", "b", backup(0)), ("lose", "a", (1, 2)),
        ("lose", "b", (0,)), ("take", "c", new(0)), ("take", "c", new(1)),
    ],
    "a result of one who was given up counts": [
        ("take", "a", new(0)), ("take", "a", new(1)), ("take", "a", new(2)), ("lose", "a", (0, 1, 2)),
        ("finish", "a", 1, True), ("take", "b", new(0)), ("take", "b", new(2)), ("take", "b", None),
    ],
    "a stranger's death changes nothing": [("take", "a", new(0)), ("lose", "x", ()), ("take", "b", new(1))],
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_what_happens_and_what_it_answers(name):
    batch_queue = BatchQueue(3)
    for now, (event, *rest) in enumerate(TABLE[name]):
        match event:
            case "take":
                assert take(batch_queue, rest[0], now) == rest[1], now
            case "finish":
                assert batch_queue.finish(rest[0], rest[1]) is rest[2], now
            case "lose":
                assert batch_queue.lose(rest[0]) == rest[1], now
            case "done":
                assert batch_queue.is_done
    assert batch_queue.is_done == (TABLE[name][-1] == ("done",))


def test_results_that_nobody_asked_for_are_refused():
    batch_queue = BatchQueue(3)
    batch_queue.take("a", 0)
    for unit, text in ((1, "nobody was asked for"), (3, "of a batch of 3"), (-1, "of a batch of 3")):
        with pytest.raises(RequestError, match=text):
            batch_queue.finish("a", unit)


@pytest.mark.parametrize("wrong", [{"num_units": 0}, {"max_copies": 0}])
def test_impossible_numbers_are_refused(wrong):
    with pytest.raises(RequestError, match="at least 1"):
        BatchQueue(**{"num_units": 4, **wrong})


def test_in_order_lets_through_in_order_and_once():
    coming = InOrder(4)
    assert coming.offer(2, "c") == [] and coming.offer(1, "b") == [] and coming.num_kept == 2
    assert not coming.is_wanted(2) and coming.offer(2, "again") == []
    assert coming.offer(0, "a") == ["a", "b", "c"] and coming.offer(0, "again") == []
    assert not coming.is_done and coming.offer(3, "d") == ["d"] and coming.is_done
    with pytest.raises(RequestError, match="work unit 4 of a batch of 4"):
        coming.offer(4, "e")


def simulate(speeds, num_units, *, deaths=(), seed=0, jitter=0.0, max_copies=2):
    """Workers with seconds per work unit; when all is done, what each work unit counted.

    ``deaths`` are (seconds, worker); a dead worker's result never comes.
    """
    draw = random.Random(seed)
    batch_queue, coming = BatchQueue(num_units, max_copies=max_copies), InOrder(num_units)
    counted, order = [], []
    ticket = itertools.count()
    events = [(0.0, next(ticket), "free", worker, None) for worker in range(len(speeds))]
    events += [(when, next(ticket), "dies", worker, None) for when, worker in deaths]
    heapq.heapify(events)
    idle, dead, now = set(), set(), 0.0
    while not batch_queue.is_done:
        assert events, "nobody does anything any more, and not all is done"
        now, _, event, worker, unit = heapq.heappop(events)
        if worker in dead:
            continue
        if event == "dies":
            dead.add(worker)
            batch_queue.lose(str(worker))
        elif unit is not None and batch_queue.finish(str(worker), unit):
            counted.append(unit)
            order += coming.offer(unit, unit)
        idle.add(worker)
        for one in sorted(idle - dead):
            handed = batch_queue.take(str(one), now)
            if handed is not None:
                idle.discard(one)
                seconds = speeds[one] * draw.uniform(1 - jitter, 1 + jitter)
                heapq.heappush(events, (now + seconds, next(ticket), "free", one, handed))
    assert order == list(range(num_units))
    return now, counted


def test_a_worker_four_times_as_slow_hardly_holds_up_the_batch():
    """Ideal: all work at their own speed to the end. One part each would take as long as if all were as slow as the slowest."""
    speeds = [1.0, 1.0, 1.0, 4.0]
    saved = []
    for num_units in range(56, 73):
        ideal = num_units / sum(1 / speed for speed in speeds)
        seconds, counted = simulate(speeds, num_units)
        assert sorted(counted) == list(range(num_units))
        assert seconds <= ideal + 1.0, "no more than one work unit of a fast worker above it"
        saved.append(simulate(speeds, num_units, max_copies=1)[0] - seconds)
    assert min(saved) >= 0 and max(saved) >= 2.0, "without backups all wait for the slow worker's last work unit"


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_each_unit_counts_once(seed):
    draw = random.Random(seed)
    num_workers = draw.randint(1, 6)
    speeds = [draw.choice([0.5, 1.0, 1.0, 4.0, 30.0]) for _ in range(num_workers)]
    deaths = [(draw.uniform(0, 40), worker) for worker in range(1, num_workers) if draw.random() < 0.5]
    _, counted = simulate(
        speeds,
        draw.randint(1, 60),
        deaths=deaths,
        seed=seed,
        jitter=0.4,
        max_copies=draw.randint(1, 3),
    )
    assert len(counted) == len(set(counted))


def test_the_sum_has_the_bits_of_one_process_whatever_the_order():
    gradients = [torch.randn(1000, generator=torch.Generator().manual_seed(seed)) for seed in range(20)]
    alone = torch.zeros(1000)
    for gradient in gradients:
        alone += gradient
    shuffled_differs = False
    total = GradientSum(torch.zeros(1000))
    for evaluation in range(5):
        order = random.Random(evaluation).sample(range(20), 20)
        total.begin(evaluation, 20)
        for unit in order:
            assert total.add(evaluation, unit, gradients[unit])
            assert not total.add(evaluation, unit, gradients[unit] + 1), "a backup that comes second"
            assert not total.add(evaluation - 1, unit, gradients[unit]), "one of older weights"
        assert torch.equal(total.total, alone)
        shuffled_differs |= not torch.equal(sum((gradients[place] for place in order), torch.zeros(1000)), alone)
    assert shuffled_differs, "the order would matter"


def test_an_evaluation_begins_once_and_never_goes_back():
    total = GradientSum(torch.zeros(2))
    total.begin(3, 2)
    total.add(3, 0, torch.ones(2))
    total.begin(3, 2)
    assert total.add(3, 1, torch.ones(2)) and total.total.tolist() == [2.0, 2.0]
    with pytest.raises(RequestError, match="evaluation 2 cannot begin: 3 has begun"):
        total.begin(2, 2)
    with pytest.raises(RequestError, match="this shard is"):
        total.add(3, 0, torch.ones(3))
    total.begin(4, 1)
    assert not total.is_done and total.evaluation == 4
