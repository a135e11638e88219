"""Where a rank's memory is, by kind and by tensor, and how much memory there is left.

The table of weights, gradients, optimizer state and the rest is an event during the run and part of the error when a run dies of
lack of memory. Torch is only looked at through the model and the optimizer that are handed in, so that the supervisor can measure
itself without importing it. Processes that try what may not fit take no more than is left (``limited_growth``).
"""

import contextlib
import ctypes
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from shoal.core.events import MemoryMeasured
from shoal.core.units import format_bytes

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

# What torch's CPU allocator says; it raises a plain RuntimeError.
_ALLOCATOR_WORDS = (
    "DefaultCPUAllocator",
    "not enough memory",
    "Cannot allocate memory",
    "out of memory",
    "MemoryError",
)


@dataclass(frozen=True, kw_only=True)
class MemoryBreakdown:
    """Bytes by what holds them. Each storage is counted once, so a tied weight is not counted twice."""

    weights_bytes: int
    """Parameters and buffers."""
    gradient_bytes: int
    optimizer_bytes: int
    rss_bytes: int
    peak_rss_bytes: int

    @property
    def other_bytes(self) -> int:
        """Resident memory that is none of the three: activations, the interpreter, libraries."""
        return max(0, self.rss_bytes - self.weights_bytes - self.gradient_bytes - self.optimizer_bytes)

    def as_event(self, step: int) -> MemoryMeasured:
        """The breakdown as an event of a step."""
        return MemoryMeasured(
            step=step,
            weights_bytes=self.weights_bytes,
            gradient_bytes=self.gradient_bytes,
            optimizer_bytes=self.optimizer_bytes,
            other_bytes=self.other_bytes,
            rss_bytes=self.rss_bytes,
            peak_rss_bytes=self.peak_rss_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class TensorSize:
    """One tensor and what it takes."""

    name: str
    kind: str
    """weight, buffer, gradient or optimizer."""
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


def rss_bytes() -> int:
    """Resident memory of this process now."""
    return int(psutil.Process().memory_info().rss)


def peak_rss_bytes() -> int:
    """The most resident memory this process ever had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class GrowthMeter:
    """How much resident memory a part of a process needs, whatever the process did before. Linux and glibc; elsewhere unknown.

    Pages of libraries do not count: they are read when code is first used, and stay.
    """

    def __init__(self) -> None:
        self._before: int | None = None
        try:
            # What was freed and kept by the allocator would be used again, and not be seen to grow.
            ctypes.CDLL(None).malloc_trim(0)
            # proc(5): 5 sets the high-water mark back to what is resident now.
            Path("/proc/self/clear_refs").write_text("5")
            self._before, self._files_before = rss_bytes(), _status_bytes("RssFile")
        except (OSError, AttributeError, KeyError):
            pass

    def read(self) -> int | None:
        """Bytes between what was resident at first and the most since; None where it cannot be known."""
        if self._before is None:
            return None
        read_since = max(0, _status_bytes("RssFile") - self._files_before)
        return max(0, _status_bytes("VmHWM") - self._before - read_since)


def _status_bytes(name: str) -> int:
    """A line of this process's status, in bytes."""
    lines = (line.partition(":") for line in Path("/proc/self/status").read_text().splitlines())
    return {key: int(value.split()[0]) * 1024 for key, _, value in lines if value.endswith("kB")}[name]


def breakdown(model: "nn.Module", optimizer: "Optimizer | None" = None) -> MemoryBreakdown:
    """Where this process's memory is now."""
    totals = {"weight": 0, "buffer": 0, "gradient": 0, "optimizer": 0}
    seen: set[int] = set()
    for _, kind, tensor in _tensors(model, optimizer):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            totals[kind] += storage.nbytes()
    return MemoryBreakdown(
        weights_bytes=totals["weight"] + totals["buffer"],
        gradient_bytes=totals["gradient"],
        optimizer_bytes=totals["optimizer"],
        rss_bytes=rss_bytes(),
        peak_rss_bytes=peak_rss_bytes(),
    )


def largest_tensors(model: "nn.Module", optimizer: "Optimizer | None" = None, *, count: int = 10) -> list[TensorSize]:
    """The tensors of the model and the optimizer that take most, largest first; equal ones by name."""
    sizes = [
        TensorSize(
            name=name,
            kind=kind,
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            num_bytes=tensor.numel() * tensor.element_size(),
        )
        for name, kind, tensor in _tensors(model, optimizer)
    ]
    return sorted(sizes, key=lambda size: (-size.num_bytes, size.name, size.kind))[:count]


def table(measured: MemoryBreakdown, largest: list[TensorSize]) -> str:
    """The breakdown and the largest tensors as text, for the error of a run that died of lack of memory."""
    rows = [
        ("weights", measured.weights_bytes),
        ("gradients", measured.gradient_bytes),
        ("optimizer state", measured.optimizer_bytes),
        ("everything else", measured.other_bytes),
        ("resident now", measured.rss_bytes),
        ("resident at most", measured.peak_rss_bytes),
    ]
    lines = [f"  {name:<18}{format_bytes(num_bytes):>12}" for name, num_bytes in rows]
    if largest:
        lines.append("  largest tensors:")
        for size in largest:
            shape = "x".join(str(length) for length in size.shape) or "scalar"
            lines.append(f"  {format_bytes(size.num_bytes):>12}  {size.kind:<9}  {size.name}  {shape} {size.dtype}")
    return "\n".join(lines)


def is_out_of_memory(error: BaseException) -> bool:
    """True when an exception means that memory ran out, whatever raised it."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError | OSError) and tells_of_memory(str(error))


def tells_of_memory(text: str) -> bool:
    """True when the text of an error, which may have come from another process, means that memory ran out."""
    return any(words in text for words in _ALLOCATOR_WORDS)


def _tensors(model: "nn.Module", optimizer: "Optimizer | None") -> Iterator[tuple[str, str, "Tensor"]]:
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        names[id(parameter)] = name
        yield name, "weight", parameter
        if parameter.grad is not None:
            yield name, "gradient", parameter.grad
    for name, buffer in model.named_buffers():
        yield name, "buffer", buffer
    if optimizer is None:
        return
    for group in optimizer.param_groups:
        # Under ZeRO these are rows of the model's parameters, in buffers of their own; elsewhere they are known already.
        for place, owner in enumerate(group["params"]):
            if id(owner) in names:
                continue
            names[id(owner)] = _name_in(group, place)
            yield names[id(owner)], "weight", owner
            if owner.grad is not None:
                yield names[id(owner)], "gradient", owner.grad
        for owner in group["params"]:
            state = optimizer.state[owner]
            for key, value in state.items():
                if hasattr(value, "untyped_storage"):
                    yield f"{names[id(owner)]}/{key}", "optimizer", value


def _name_in(group: dict[str, Any], place: int) -> str:
    """What torch knows a parameter of a group by, where it was given with its name."""
    names = group.get("param_names")
    return str(names[place]) if names else "?"


_CGROUPS = Path("/sys/fs/cgroup")
_FIRST_TO_GO = "1000"
"""proc(5), oom_score_adj: the kernel ends such a process before any other."""


def free_bytes() -> int:
    """Memory that can still be taken: by the system, or by a control group of this process where that allows less."""
    free = int(psutil.virtual_memory().available)
    return min([free, *(left for group in _control_groups() if (left := free_in_group(group)) is not None)])


def free_in_group(folder: Path) -> int | None:
    """What a control group (cgroups v2) lets its processes take still; None where it sets no limit."""
    try:
        # "max" where there is no limit, which is no number.
        limit, current = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
        lines = (folder / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):
        return None
    # Files that were read and are not in use: the kernel gives that memory back before it refuses any.
    cached = sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
    return max(0, limit - current + cached)


def _control_groups() -> list[Path]:
    """The folders of this process's control group and of those around it."""
    try:
        own = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return [_CGROUPS]
    folder = _CGROUPS / own.removeprefix("0::").strip("/")
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(_CGROUPS))]


@contextlib.contextmanager
def limited_growth(most_bytes: int) -> Iterator[None]:
    """Inside, an allocation that would make this process larger by more than that fails, as one that the system refuses.

    Without it Linux grants every allocation and kills a process when the memory is touched. Linux only; elsewhere nothing is
    limited.
    """
    if sys.platform != "linux":
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _data_bytes() + most_bytes
    limit = min([limit, *(known for known in before if known != resource.RLIM_INFINITY)])
    resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _data_bytes() -> int:
    """What counts against the limit: private memory that can be written to, touched or not."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmData:"))


def offer_to_the_kernel() -> None:
    """Should memory run out all the same, let it be this process that is killed, and not one that holds somebody's work."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_GO)
