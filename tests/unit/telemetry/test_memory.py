"""Memory is counted by what holds it, once per storage."""

import resource
import sys

import psutil
import pytest
import torch
from torch import nn

from shoal.telemetry.memory import (
    breakdown,
    free_bytes,
    free_in_group,
    is_out_of_memory,
    largest_tensors,
    limited_growth,
    peak_rss_bytes,
    rss_bytes,
    table,
)


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


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts all private memory on Linux only")


def test_more_than_the_limit_is_refused_and_less_is_not():
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with limited_growth(256 << 20):
        assert torch.ones(16 << 20, dtype=torch.uint8).sum() == 16 << 20
        with pytest.raises(RuntimeError) as refused:
            torch.empty(1 << 30, dtype=torch.uint8)
        assert is_out_of_memory(refused.value)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    assert torch.empty(1 << 30, dtype=torch.uint8).numel() == 1 << 30


def test_the_limit_goes_with_an_error_too():
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with pytest.raises(KeyError), limited_growth(256 << 20):
        raise KeyError
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_a_control_group_counts_without_files_that_can_be_dropped(tmp_path):
    assert free_in_group(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("990\n")
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 600\nactive_file 90\n")
    assert free_in_group(tmp_path) == 610
    (tmp_path / "memory.max").write_text("max\n")
    assert free_in_group(tmp_path) is None


def test_what_is_free_is_not_more_than_there_is():
    assert 0 < free_bytes() <= psutil.virtual_memory().total
