"""A process that may not grow: the allocation fails, is known for what it is, and the limit goes with the block."""

import resource
import sys

import psutil
import pytest
import torch

from shoal.telemetry.headroom import free_bytes, free_in_group, limited_growth
from shoal.telemetry.memory import is_out_of_memory

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
