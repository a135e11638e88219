"""How a batch gets from a loader process to its rank: through memory without a name.

torch's own way hands a file descriptor over through a socket of the loader process, whose name lies in the temporary folder and
stays there when the rank is killed. Here the loader process says under which number it has the memory open, and the rank opens
it by way of ``/proc``: nothing has a name, so nothing is left behind whoever dies, and a small ``/dev/shm`` limits nobody. It
costs the same: the tensors are copied once, into memory that the rank then maps, and a mapped batch holds one descriptor.
"""

import errno
import mmap
import os
import sys
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.core.errors import RunError
from shoal.data.batchform import BatchForm, Targets, flat_targets
from shoal.data.source import Items

_ALIGNED = 64


@dataclass(frozen=True, kw_only=True)
class _TensorPlace:
    """Where a tensor lies in a shared batch."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True, kw_only=True)
class SharedBatch:
    """The items of a microbatch, in memory of the process that made them."""

    pid: int
    descriptor: int
    num_bytes: int
    tensors: tuple[_TensorPlace, ...]
    """The inputs, and the targets last."""
    weight: int
    num_targets: int | None = None
    """How many of the tensors are targets; None where these are one tensor, and not the tensors of a structure."""
    form: BatchForm | None = None

    def open(self) -> Items:
        """The items; whoever made them must still have them open.

        Raises:
            RunError: it has ended, or the memory cannot be opened for another reason.
        """
        try:
            descriptor = os.open(f"/proc/{self.pid}/fd/{self.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        except (FileNotFoundError, ProcessLookupError) as error:
            raise RunError(f"loader process {self.pid} has ended, and its batch with it: {error}") from error
        except OSError as error:
            is_full = error.errno in (errno.EMFILE, errno.ENFILE)
            fix = "raise the limit of open files (ulimit -n)" if is_full else "set data.workers=0"
            raise RunError(f"a batch of loader process {self.pid} cannot be opened: {error}; {fix}") from error
        try:
            memory = mmap.mmap(descriptor, self.num_bytes)
        finally:
            os.close(descriptor)
        tensors = tuple(_view(memory, place) for place in self.tensors)
        cut = len(tensors) - (1 if self.num_targets is None else self.num_targets)
        targets: Targets = tensors[cut] if self.num_targets is None else tensors[cut:]
        return Items(inputs=tensors[:cut], targets=targets, weight=self.weight, form=self.form)


class SharedBatchWriter:
    """Makes shared batches and keeps the last ones open, in a loader process.

    Args:
        keep: how many; more than its rank may have asked for and not opened yet.
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._kept: deque[int] = deque()
        self._is_open: bool | None = None
        """Whether the rank can open what this process has; found at the first batch, when this is the loader process."""

    def write(self, items: Items) -> SharedBatch | Items:
        """The items as a shared batch; as they are where they cannot be one, and torch hands them over in its way."""
        tensors = (*items.inputs, *flat_targets(items.targets))
        if self._is_open is None:
            self._is_open = sys.platform == "linux" and _is_open(os.getppid())
        if not self._is_open or not all(_is_plain(tensor) for tensor in tensors):
            return items
        places: list[_TensorPlace] = []
        end = 0
        for tensor in tensors:
            places.append(_TensorPlace(dtype=tensor.dtype, shape=tuple(tensor.shape), start=end))
            end += -(-tensor.numel() * tensor.element_size() // _ALIGNED) * _ALIGNED
        num_bytes = max(end, _ALIGNED)
        descriptor = os.memfd_create("shoal-batch")
        self._kept.append(descriptor)
        os.ftruncate(descriptor, num_bytes)
        memory = mmap.mmap(descriptor, num_bytes)
        for tensor, place in zip(tensors, places, strict=True):
            _view(memory, place).copy_(tensor)
        while len(self._kept) > self._keep:
            os.close(self._kept.popleft())
        return SharedBatch(
            pid=os.getpid(),
            descriptor=descriptor,
            num_bytes=num_bytes,
            tensors=tuple(places),
            weight=items.weight,
            num_targets=None if isinstance(items.targets, Tensor) else len(items.targets),
            form=items.form,
        )


def _is_open(pid: int) -> bool:
    """True where processes of one family may open each other's files: some machines let only root look into ``/proc``.

    Asked of the parent by its child, which is as near as the child can come to being asked by the parent.
    """
    try:
        return os.access(f"/proc/{pid}/fd", os.R_OK | os.X_OK) and bool(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return False


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_quantized
    )


def _view(memory: mmap.mmap, place: _TensorPlace) -> Tensor:
    count = 1
    for size in place.shape:
        count *= size
    if count == 0:
        return torch.empty(place.shape, dtype=place.dtype)
    return torch.frombuffer(memory, dtype=place.dtype, count=count, offset=place.start).view(place.shape)
