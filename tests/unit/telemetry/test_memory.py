"""Memory is counted by what holds it, once per storage."""

import torch
from torch import nn

from shoal.telemetry.memory import breakdown, is_out_of_memory, largest_tensors, peak_rss_bytes, rss_bytes, table


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.set_num_threads(1)
    model = nn.Sequential(
        nn.Linear(10, 20, bias=False), nn.BatchNorm1d(20, affine=False), nn.Linear(20, 10, bias=False)
    )
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model(torch.randn(4, 10)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_breakdown() -> None:
    model, optimizer = build()
    measured = breakdown(model, optimizer)
    weights = 4 * 2 * 200
    assert measured.weights_bytes == weights + 4 * 40 + 8  # two matrices, running statistics, the batch counter
    assert measured.gradient_bytes == weights
    assert measured.optimizer_bytes == 2 * weights + 2 * 4  # two moments, and a step counter each
    assert measured.rss_bytes == measured.weights_bytes + 3 * weights + 8 + measured.other_bytes
    assert measured.peak_rss_bytes >= measured.rss_bytes // 2 > 1 << 20


def test_tied_weight_is_counted_once() -> None:
    first, second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    second.weight = nn.Parameter(first.weight.detach())
    assert breakdown(nn.Sequential(first, second)).weights_bytes == 4 * 64


def test_event_says_the_same() -> None:
    measured = breakdown(*build())
    event = measured.as_event(7)
    assert event.step == 7
    parts = event.weights_bytes + event.gradient_bytes + event.optimizer_bytes + event.other_bytes
    assert parts == event.rss_bytes


def test_largest_tensors_by_name() -> None:
    model, optimizer = build()
    largest = largest_tensors(model, optimizer, count=8)
    assert [(size.name, size.kind) for size in largest[:4]] == [
        ("0.weight", "gradient"),
        ("0.weight", "weight"),
        ("0.weight/exp_avg", "optimizer"),
        ("0.weight/exp_avg_sq", "optimizer"),
    ]
    assert all(size.num_bytes == 800 for size in largest)
    assert len(largest) == 8


def test_table() -> None:
    model, optimizer = build()
    text = table(breakdown(model, optimizer), largest_tensors(model, optimizer, count=1))
    assert "weights" in text
    assert "800 B  gradient   0.weight  20x10 float32" in text


def test_out_of_memory_is_recognised() -> None:
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("x"))
    try:
        torch.empty(1 << 60)
    except RuntimeError as error:
        assert is_out_of_memory(error)
    assert not is_out_of_memory(RuntimeError("shape mismatch"))


def test_resident_memory() -> None:
    assert 1 << 20 < rss_bytes() <= peak_rss_bytes() * 2
