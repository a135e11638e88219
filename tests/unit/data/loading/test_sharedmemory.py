"""A batch through memory without a name: the same bits, of every kind of tensor, as long as the one that made it lives."""

import os
import resource
import subprocess
import sys

import pytest
import torch

from shoal.core.errors import RunError
from shoal.data.loading.sharedmemory import SharedBatch, SharedBatchWriter
from shoal.data.source import Items

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc elsewhere")
TENSORS = (
    torch.arange(6.0).reshape(2, 3).t(),
    torch.tensor([True, False, True]),
    torch.randn(3, 5, dtype=torch.bfloat16),
    torch.zeros(0, 4, dtype=torch.int64),
    torch.tensor(7, dtype=torch.int32),
)


def packed(writer: SharedBatchWriter, *inputs: torch.Tensor) -> SharedBatch:
    found = writer.write(Items(inputs=inputs, targets=torch.arange(3), weight=3))
    assert isinstance(found, SharedBatch)
    return found


def test_what_comes_out_is_what_went_in_and_can_be_written_to() -> None:
    opened = packed(SharedBatchWriter(2), *TENSORS).open()
    for found, wanted in zip((*opened.inputs, opened.targets), (*TENSORS, torch.arange(3)), strict=True):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        assert torch.equal(found, wanted)
    opened.inputs[0].add_(1.0)
    assert opened.weight == 3


def test_memory_lives_as_long_as_its_tensors_and_only_the_last_batches_are_kept_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    writer = SharedBatchWriter(2)
    opened = [packed(writer, torch.full((4,), float(number))).open() for number in range(5)]
    assert [items.inputs[0][0].item() for items in opened] == [0.0, 1.0, 2.0, 3.0, 4.0]
    del opened
    assert len(os.listdir("/proc/self/fd")) == before + 2


def test_what_is_no_plain_tensor_is_left_to_torch() -> None:
    items = Items(inputs=(torch.eye(3).to_sparse(),), targets=torch.arange(3), weight=3)
    assert SharedBatchWriter(2).write(items) is items


def test_the_batch_of_a_process_that_has_ended_is_an_error_that_says_so() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with pytest.raises(RunError, match=f"loader process {ended.pid} has ended, and its batch with it"):
        SharedBatch(pid=ended.pid, descriptor=3, num_bytes=64, tensors=(), weight=0).open()


def test_a_batch_that_cannot_be_opened_for_another_reason_says_which() -> None:
    """Every error was told as a loader process that had ended, which sent people to look for a crash."""
    batch = packed(SharedBatchWriter(2), torch.zeros(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(RunError, match=r"of loader process \d+ cannot be opened: \[Errno 24\] .*ulimit -n"):
            batch.open()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


NOT_TO_BE_LOOKED_INTO = """
import ctypes, os, torch
from shoal.data.loading.sharedmemory import SharedBatchWriter
from shoal.data.source import Items

if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: from now on only root may look into /proc/PID/fd.
child = os.fork()
if child == 0:
    items = Items(inputs=(torch.zeros(1),), targets=torch.zeros(1), weight=1)
    os._exit(7 if SharedBatchWriter(2).write(items) is items else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_where_proc_is_closed_batches_go_torchs_way() -> None:
    done = subprocess.run([sys.executable, "-c", NOT_TO_BE_LOOKED_INTO], capture_output=True, text=True, check=False)
    assert done.returncode == 7, done.stderr
