"""Compute types: which of them a device and a software have, which are faster than a recipe's own, and which Shoal executes."""

from collections.abc import Sequence

from shoal.core.errors import RequestError, did_you_mean
from shoal.planner.hardware import Device
from shoal.planner.stacks import Software

PRECISIONS = ("float64", "float32", "bfloat16", "float16", "float8", "float4")
"""All that can be asked for."""
EXECUTED_PRECISIONS = ("float64", "float32", "bfloat16", "float16")
"""What ``train.precision`` can be."""
_LADDER = ("bfloat16", "float16", "float8", "float4")
"""Where several are as fast, the first is the one whose range needs the least care."""
_NARROW = {
    # Transformer Engine (docs.nvidia.com, "FP8 and FP4 primer"); torchao.float8 (pytorch/torchtitan, docs/float8.md).
    "float8": ("megatron-core", "megatron-core-graphs", "torchtitan"),
    "float4": ("megatron-core", "megatron-core-graphs"),
}
"""Software that computes products in fewer than 16 bits."""


def lacks(precision: str, device: Device, software: Software) -> str:
    """Why a device with a software cannot compute in a type; empty where it can."""
    if precision not in device.peak_flops:
        return f"{device.name} has {', '.join(device.peak_flops)}"
    able = _NARROW.get(precision)
    if able is not None and software.name not in able:
        return f"{software.name} does not compute in it, and {', '.join(able)} do: set planner.software"
    return ""


def faster_precisions(own: str, device: Device, software: Software) -> tuple[str, ...]:
    """Types in which a device computes faster than in a recipe's own, each faster than the one before."""
    found = []
    rate = device.flops(own)
    for precision in _LADDER:
        if not lacks(precision, device, software) and device.flops(precision) > rate:
            found.append(precision)
            rate = device.flops(precision)
    return tuple(found)


def check_precisions(wanted: Sequence[str], device: Device, software: Software) -> tuple[str, ...]:
    """The types that were asked for, each once.

    Raises:
        RequestError: one is unknown, or the device or the software does not have it.
    """
    for precision in wanted:
        if precision not in PRECISIONS:
            raise RequestError(f"there is no precision {precision!r}; {did_you_mean(precision, PRECISIONS)}")
        why = lacks(precision, device, software)
        if why:
            raise RequestError(f"no plan computes in {precision} here: {why}; leave {precision} out")
    return tuple(dict.fromkeys(wanted))
