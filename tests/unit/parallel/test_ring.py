"""The ring by itself: threads stand for ranks, and attention over the whole sequence is the reference."""

import queue
import threading

import pytest
import torch
import torch.nn.functional as F

import shoal.parallel.context.ring as ring
from shoal.comm.channel import Channel
from shoal.comm.trafficcounter import TrafficCounter
from shoal.parallel.context.alltoall import alltoall_attention, num_copies
from shoal.parallel.context.positions import Positions, gather_sequence
from shoal.parallel.context.ring import ring_attention, visible_part

BATCH, LENGTH, WIDTH = 2, 24, 8
DEADLINE_SECONDS = 30.0


class Threads:
    """A transport between threads: a queue per pair of ranks."""

    def __init__(self, rank, queues):
        self.rank, self.queues, self.size = rank, queues, len(queues)

    def all_to_all(self, sent, received):
        for peer, tensor in enumerate(sent):
            self.queues[self.rank][peer].put(tensor.clone())
        for peer, tensor in enumerate(received):
            tensor.copy_(self.queues[peer][self.rank].get(timeout=DEADLINE_SECONDS))

    def ring_shift(self, sent, received, by):
        self.queues[self.rank][(self.rank + by) % self.size].put(sent.clone())
        received.copy_(self.queues[(self.rank - by) % self.size][self.rank].get(timeout=DEADLINE_SECONDS))

    def all_gather(self, own, whole, counts):
        self.all_to_all([own] * self.size, list(torch.split(whole, list(counts))))

    def reduce_scatter(self, whole, own, counts):
        parts = [torch.empty_like(own) for _ in range(self.size)]
        self.all_to_all(list(torch.split(whole, list(counts))), parts)
        own.copy_(torch.stack(parts).sum(0))


def on_threads(size, function):
    """``function(channel)`` for every rank; a rank's error is raised here."""
    queues = [[queue.Queue() for _ in range(size)] for _ in range(size)]
    results = [None] * size

    def work(rank):
        transport = Threads(rank, queues) if size > 1 else None
        try:
            results[rank] = function(Channel("cp", rank=rank, size=size, transport=transport, traffic=TrafficCounter()))
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_SECONDS)
        assert not thread.is_alive()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def draw(*, heads=4, kv_heads=4, value_width=WIDTH, dtype=torch.float64):
    torch.manual_seed(0)
    shapes = [(heads, WIDTH), (kv_heads, WIDTH), (kv_heads, value_width), (heads, value_width)]
    return [torch.randn(BATCH, number, LENGTH, width, dtype=torch.float64).to(dtype) for number, width in shapes]


def whole_attention(query, key, value, grad, *, mask, causal, scale):
    leaves = [tensor.detach().double().requires_grad_() for tensor in (query, key, value)]
    groups = query.shape[1] // key.shape[1]
    scores = leaves[0] @ leaves[1].repeat_interleave(groups, 1).transpose(-2, -1) * (scale or WIDTH**-0.5)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if causal:
        scores = scores.masked_fill(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), -torch.inf)
    output = scores.softmax(-1).nan_to_num(0.0) @ leaves[2].repeat_interleave(groups, 1)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad.double())]


def shared_attention(size, kind, query, key, value, grad, *, mask, causal, scale):
    def work(channel):
        positions = Positions(kind=kind, rank=channel.rank, degree=size)
        leaves = [positions.cut(tensor, 2).requires_grad_() for tensor in (query, key, value)]
        if kind == "ring":
            rows = mask if mask is None or mask.shape[-2] == 1 else positions.cut(mask, -2)
            output = ring_attention(
                *leaves, channel=channel, positions=positions, mask=rows, causal=causal, scale=scale
            )
        else:
            output = alltoall_attention(*leaves, channel=channel, mask=mask, causal=causal, scale=scale)
        return [output.detach(), *torch.autograd.grad(output, leaves, positions.cut(grad, 2))]

    by_rank = on_threads(size, work)
    positions = Positions(kind=kind, rank=0, degree=size)
    return [positions.join(parts, 2) for parts in zip(*by_rank, strict=True)]


def error(found, expected):
    return max(
        float((ours.double() - theirs).norm() / theirs.norm()) for ours, theirs in zip(found, expected, strict=True)
    )


MASKS = {
    "none": None,
    "padding": torch.arange(LENGTH) < torch.tensor([LENGTH, 9])[:, None, None, None],
    "window": ((torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs() < 4)[None, None],
    "added, by head": torch.linspace(-3, 3, 4 * LENGTH * LENGTH, dtype=torch.float64).view(1, 4, LENGTH, LENGTH),
}


@pytest.mark.parametrize("causal", [False, True], ids=["both ways", "causal"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("kind", "size", "kv_heads"),
    [("ring", 1, 4), ("ring", 2, 2), ("ring", 3, 1), ("ring", 4, 4), ("alltoall", 2, 1), ("alltoall", 4, 2)],
)
def test_attention_over_ranks_is_attention_over_the_whole(kind, size, kv_heads, mask, causal):
    tensors = draw(kv_heads=kv_heads)
    options = {"mask": MASKS[mask], "causal": causal, "scale": 0.4}
    assert error(shared_attention(size, kind, *tensors, **options), whole_attention(*tensors, **options)) < 1e-14


def test_values_of_another_width_take_the_written_out_path():
    tensors = draw(kv_heads=2, value_width=5)
    options = {"mask": MASKS["padding"], "causal": True, "scale": None}
    assert error(shared_attention(2, "ring", *tensors, **options), whole_attention(*tensors, **options)) < 1e-14


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_merged_in_float32(dtype):
    tensors = draw(kv_heads=2, dtype=dtype)
    options = {"mask": None, "causal": True, "scale": None}
    expected = whole_attention(*tensors, **options)
    alone = [tensor.detach().requires_grad_() for tensor in tensors[:3]]
    output = F.scaled_dot_product_attention(*alone, is_causal=True, enable_gqa=True)
    plain = error([output.detach(), *torch.autograd.grad(output, alone, tensors[3])], expected)
    # No worse than twice what one process loses by the type alone.
    assert error(shared_attention(3, "ring", *tensors, **options), expected) < 2 * plain


def test_causal_work_is_the_same_on_every_rank():
    """Counted in the calls themselves: pairs of a query and a key, where a causal call costs half of a full one."""
    work = {}
    honest = ring.attend

    def counting(query, key, value, *, mask, causal, scale):
        pairs = query.shape[-2] * key.shape[-2]
        work.setdefault(threading.get_ident(), []).append(pairs / 2 if causal else pairs)
        return honest(query, key, value, mask=mask, causal=causal, scale=scale)

    ring.attend = counting
    try:
        shared_attention(4, "ring", *draw(), mask=None, causal=True, scale=None)
    finally:
        ring.attend = honest
    each = 2 * (LENGTH // 8) ** 2
    assert list(work.values()) == [[each] * 4] * 4
    # Half of what attention both ways costs: what no query sees is skipped.
    assert 4 * 4 * each == LENGTH**2 / 2


def test_every_visible_pair_is_computed_once():
    size = 3
    for rank in range(size):
        seen = torch.zeros(LENGTH, LENGTH, dtype=torch.long)
        rows = Positions(kind="ring", rank=rank, degree=size).select(LENGTH)
        for source in range(size):
            part = visible_part(rank, source, causal=True)
            columns = Positions(kind="ring", rank=source, degree=size).select(LENGTH)
            half = LENGTH // size // 2
            own, other = (
                numbers[first * half : last * half]
                for numbers, (first, last) in ((rows, part.rows), (columns, part.columns))
            )
            pairs = torch.ones(len(own), len(other), dtype=torch.long)
            seen[own[:, None], other] += pairs.tril() if part.is_diagonal else pairs
        assert torch.equal(seen[rows], torch.ones(LENGTH, LENGTH, dtype=torch.long).tril()[rows])


@pytest.mark.parametrize("kind", ["ring", "alltoall"])
def test_gather_is_undone_by_cut_and_its_gradient_is_the_sum_over_ranks(kind):
    whole = torch.randn(2, 12, 3, dtype=torch.float64)
    grads = torch.randn(2, 2, 12, 3, dtype=torch.float64)

    def work(channel):
        positions = Positions(kind=kind, rank=channel.rank, degree=2)
        local = positions.cut(whole, 1).requires_grad_()
        gathered = gather_sequence(local, 1, positions, channel)
        (grad,) = torch.autograd.grad(gathered, local, grads[channel.rank])
        return torch.equal(gathered, whole) and torch.equal(grad, positions.cut(grads.sum(0), 1))

    assert on_threads(2, work) == [True, True]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "degree", "copies"), [(8, 4, 2, 1), (8, 2, 4, 2), (6, 2, 3, 3), (6, 1, 2, 2)]
)
def test_shared_key_heads_are_sent_as_often_as_needed(heads, kv_heads, degree, copies):
    assert num_copies(heads, kv_heads, degree) == copies
