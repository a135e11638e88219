"""What a plan is priced on: devices, the links between them, and clusters, as values. Presets are in ``presets.py``. No torch.

A cluster is nested groups of devices: each tier says how many devices it joins and what a device can send through it. A
collective runs at the speed of the widest tier that its ranks span.

The compute types are here too: which of them a device and a software have, and which are faster than a recipe's own.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import AfterValidator, Field

from shoal.core.config import Config
from shoal.core.errors import RequestError, did_you_mean, nearest
from shoal.planner.hardware.software import Constants, Software

CONTEXT_BYTES = 2.0 * 2**30
"""What a process has on a device before its first tensor: the driver's context, kernels, NCCL's buffers. It differs by driver
and by the number of communicators, and no data sheet has it: by hand, from the ``nvidia-smi`` rows of the calibration table."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator or one processor, by its data sheet."""

    name: str
    peak_flops: Mapping[str, float]
    """Dense matrix products per second by compute type, of ``COMPUTE_TYPES``."""
    memory_bytes: float
    memory_bandwidth: float
    """Bytes per second."""
    source: str
    """Where these numbers are from."""
    watts: float | None = None
    """Power that it may draw; None where that is not known, and then it does not limit it."""
    context_bytes: float = CONTEXT_BYTES
    """What a process has on it before its first tensor."""
    exponentials: float | None = None
    """Exponentials per second, which a softmax waits for; None where no document says, and then what Hopper has for its peak."""

    def flops(self, precision: str) -> float:
        """Peak of a compute type; where the device has none of its own, of the next wider one that it has."""
        for candidate in COMPUTE_TYPES[COMPUTE_TYPES.index(precision) :]:
            if candidate in self.peak_flops:
                return self.peak_flops[candidate]
        raise RequestError(
            f"{self.name} has no peak for {precision} or anything wider, but for {', '.join(self.peak_flops)}; "
            f"plan in that (train.precision), or give a peak for {precision} (peak_tflops)"
        )

    def sustained_flops(self, precision: str) -> float:
        """What its clock and its power allow for long: a product in half the bits takes half the energy.

        Neither limit alone is reached near the other one, because voltage and clock are lowered before the power is used up and
        kernels differ in what they draw: the two add up like the two sides of a right angle.
        """
        peak = self.flops(precision)
        if self.watts is None:
            return peak
        powered = self.watts * _FLOPS_PER_JOULE * peak / self.flops(self.half_type)
        return 1 / math.hypot(1 / peak, 1 / powered)

    @property
    def free_bytes(self) -> float:
        """What is left of its memory for a plan."""
        return self.memory_bytes - self.context_bytes

    @property
    def half_type(self) -> str:
        """The type of 16 bits that it has: older devices, and some users' numbers, have float16 alone."""
        return "float16" if "float16" in self.peak_flops and "bfloat16" not in self.peak_flops else "bfloat16"

    @property
    def softmax_rate(self) -> float:
        """Exponentials per second."""
        return self.exponentials or self.flops(self.half_type) / _FLOPS_PER_EXPONENTIAL


_FLOPS_PER_JOULE = 1.4e12
"""At most, in 16 bit; set by hand, once for all devices. With it an A100 sustains 0.87 of its peak, an H100 0.70, a B200 0.53;
large products on a B200 of 1 kW reach 0.45 to 0.51 (SimuMax 1.2, configs/system/b200_bf16_ceperm.json)."""
_FLOPS_PER_EXPONENTIAL = 256.0
"""Of a device of which only the peak is known: 989 Tflop/s for 3.9e12 exponentials (Shah et al. 2024, arXiv:2407.08608, 3.1)."""
COMPUTE_TYPES = ("float4", "float8", "float16", "bfloat16", "tf32", "float32", "float64")
"""Narrowest first. ``tf32`` is float32 whose products round their operands to 10 bits: no plan computes in it, tables may."""
WIDE_TYPES = ("tf32", "float32", "float64")
"""Types of which weights and activations have more than 16 bits."""


Positive = Annotated[float, Field(gt=0.0)]
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "fp8": "float8", "fp4": "float4"}


def _check_types(peaks: dict[str, float]) -> dict[str, float]:
    for name in peaks:
        if name not in COMPUTE_TYPES:
            close = _SHORT.get(name.lower()) or nearest(name.lower(), COMPUTE_TYPES)
            offer = f"did you mean {close!r}? " if close else ""
            raise ValueError(f"there is no compute type {name!r}; {offer}there are {', '.join(COMPUTE_TYPES)}")
    return peaks


class DeviceConfig(Config):
    """A device by the user's own numbers; named in --cluster like a preset."""

    peak_tflops: Annotated[dict[str, Positive], Field(min_length=1), AfterValidator(_check_types)]
    """Dense matrix products per second, in 10^12, by compute type: float64, float32, tf32, bfloat16, float16, float8, float4."""
    memory_gib: Positive
    """Memory."""
    memory_gb_per_s: Positive
    """Bandwidth of the memory, in 10^9 bytes per second."""
    link_gb_per_s: Positive
    """What one device sends to others of its node, in 10^9 bytes per second."""
    link_latency_us: Positive = 10.0
    """Microseconds of a message inside a node."""
    network_gb_per_s: Positive = 12.5
    """What one device sends to other nodes, in 10^9 bytes per second."""
    network_latency_us: Positive = 20.0
    """Microseconds of a message between nodes."""


@dataclass(frozen=True, kw_only=True)
class Tier:
    """One kind of link: what joins a group of devices."""

    name: str
    devices: int
    """Devices that it joins, those of the tiers inside it included."""
    bandwidth: float
    """Bytes per second that one device sends, and receives, through it."""
    latency: float
    """Seconds of one message."""
    source: str
    is_mesh: bool = False
    """Every pair of devices has links of its own, and no switch: some of the devices have between them only their share."""

    def bandwidth_among(self, num_devices: int) -> float:
        """Bytes per second of one device to so many, itself counted, of those that are joined."""
        return self.bandwidth * (num_devices - 1) / (self.devices - 1) if self.is_mesh else self.bandwidth


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Devices of one kind, and the tiers that join them, innermost first; the last joins all."""

    device: Device
    tiers: tuple[Tier, ...]
    beyond: Tier | None = None
    """What would join more devices than there are; None where nobody said."""
    reached: Constants | None = None
    """What is reached of these numbers, where they were measured; None where they are a data sheet's."""
    warnings: tuple[str, ...] = ()
    """What speaks against them, for people."""

    @property
    def num_devices(self) -> int:
        """All of them."""
        return self.tiers[-1].devices

    @property
    def devices_per_node(self) -> int:
        """Devices of the innermost tier."""
        return self.tiers[0].devices

    def resized(self, num_devices: int) -> "Cluster":
        """The same kind of cluster with another number of devices: nodes stay as large as they are."""
        known = self.tiers if self.beyond is None else (*self.tiers, self.beyond)
        inner = tuple(tier for tier in known[:-1] if tier.devices < num_devices)
        last = known[len(inner)]
        beyond = known[len(inner) + 1] if len(inner) + 1 < len(known) else None
        return replace(self, tiers=(*inner, replace(last, devices=num_devices)), beyond=beyond)


_CLUSTER = re.compile(r"(?P<name>[^:]+):(?:(?P<nodes>[0-9]{1,1000})x)?(?P<devices>[0-9]{1,1000})")
_MOST = 1_000_000


@dataclass(frozen=True)
class ClusterName:
    """``a100-80gb:16x8`` taken apart: a preset, nodes, devices in each."""

    preset: str
    num_nodes: int
    devices_per_node: int


def parse_cluster(text: str) -> ClusterName:
    """The parts of ``NAME:NODESxDEVICES``; ``NAME:DEVICES`` is one node.

    Raises:
        RequestError: the text is something else.
    """
    found = _CLUSTER.fullmatch(text.strip())
    if found is None:
        raise RequestError(
            f"cluster {text!r} is not NAME:NODESxDEVICES; write for example a100-80gb:16x8, or a machine file"
        )
    nodes, devices = int(found["nodes"] or 1), int(found["devices"])
    if not 1 <= nodes * devices <= _MOST:
        told = f"{nodes} x {devices} devices" if nodes * devices <= _MOST**2 else "too many devices"
        raise RequestError(f"cluster {text!r} has {told}; give 1 to {_MOST:,} in all")
    return ClusterName(found["name"].strip().lower(), nodes, devices)


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
