"""Devices and links by name, from data sheets, with sources. Peaks are dense; ``software.py`` has what is reached of them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shoal.core.errors import RequestError, offer
from shoal.planner.hardware.devices import (
    CONTEXT_BYTES,
    Cluster,
    ClusterName,
    Device,
    DeviceConfig,
    Tier,
    parse_cluster,
)

GB = 1e9
GIB = 2.0**30
TERA = 1e12


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A device and the links that it is usually sold with."""

    device: Device
    inside: str
    """The link inside a node, of ``LINKS``."""
    between: str
    """The link between nodes."""
    devices_per_node: int
    """Devices that the inner link joins at most."""
    is_usual: bool
    """What is meant where only the family is named."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """Bytes per second of one device in one direction, and the seconds of a message."""

    bandwidth: float
    latency: float
    source: str
    is_mesh: bool = False
    """Links go from device to device, without a switch."""


# Latencies are by hand: no data sheet has them, and the constants of stacks were fitted beside them, so they stay. They are of
# one hop, with its share of what a collective takes once. For comparison, NCCL's own model (NVIDIA/nccl 2.20,
# src/graph/tuning.cc, rings with the protocol Simple): 3.4 us a hop over NVLink, 5.7 us over PCI Express, 14 us over a network,
# and 8.4 us once. Infinity Fabric is put between the first two; Omni-Path and Ethernet, which go through more of the host, above
# InfiniBand. For memory ``shoal calibrate`` has the machine's own.
LINKS: dict[str, Link] = {
    "nvlink2": Link(
        bandwidth=150 * GB, latency=6e-6, source="NVIDIA V100 data sheet: 300 GB/s both ways", is_mesh=True
    ),
    "nvlink3": Link(bandwidth=300 * GB, latency=6e-6, source="NVIDIA A100 data sheet: 600 GB/s both ways"),
    "nvlink3-export": Link(bandwidth=200 * GB, latency=6e-6, source="NVIDIA A800 and H800: 400 GB/s both ways"),
    "nvlink4": Link(bandwidth=450 * GB, latency=6e-6, source="NVIDIA H100 data sheet: 900 GB/s both ways"),
    "nvlink5": Link(bandwidth=900 * GB, latency=6e-6, source="NVIDIA B200 data sheet: 1.8 TB/s both ways"),
    "infinity-fabric": Link(
        bandwidth=448 * GB, latency=8e-6, source="AMD MI300X data sheet: 7 links of 64 GB/s each way", is_mesh=True
    ),
    # A die drives eight links of 50 GB/s (rocm.docs.amd.com, "AMD Instinct MI250 microarchitecture"): four to the other die of
    # its module, one to the host. The three that are left are what a ring over a node has: derived, not from a sheet. It is one
    # number for unlike pairs: two dies of a module have 200 GB/s between them, others 50 to 100 (OLCF, "Frontier User Guide").
    "infinity-fabric-2": Link(
        bandwidth=150 * GB,
        latency=8e-6,
        source="AMD MI250 microarchitecture: 3 links of 50 GB/s from a die to other modules",
    ),
    "pcie4": Link(bandwidth=32 * GB, latency=10e-6, source="PCI Express 4.0 x16: 32 GB/s each way"),
    "pcie5": Link(bandwidth=64 * GB, latency=10e-6, source="PCI Express 5.0 x16: 64 GB/s each way"),
    "infiniband-hdr": Link(bandwidth=25 * GB, latency=12e-6, source="InfiniBand HDR: 200 Gb/s a device"),
    "infiniband-ndr": Link(bandwidth=50 * GB, latency=12e-6, source="InfiniBand NDR: 400 Gb/s a device"),
    "infiniband-xdr": Link(bandwidth=100 * GB, latency=12e-6, source="InfiniBand XDR: 800 Gb/s a device"),
    "infiniband-edr": Link(bandwidth=12.5 * GB, latency=12e-6, source="InfiniBand EDR: 100 Gb/s a device"),
    "slingshot-11": Link(
        bandwidth=12.5 * GB,
        latency=12e-6,
        source="HPE Slingshot-11: 4 ports of 200 Gb/s for 8 devices (LUMI-G, Frontier)",
    ),
    "omni-path": Link(bandwidth=6.25 * GB, latency=15e-6, source="Omni-Path 100: 4 ports of 100 Gb/s for 8 devices"),
    "ethernet-100g": Link(bandwidth=12.5 * GB, latency=30e-6, source="100 Gb/s Ethernet, a port a device"),
    "ethernet-10g": Link(bandwidth=1.25 * GB, latency=50e-6, source="10 Gb/s Ethernet, a port a device"),
    "ethernet-1g": Link(bandwidth=0.125 * GB, latency=100e-6, source="1 Gb/s Ethernet"),
    "ethernet-100m": Link(bandwidth=0.0125 * GB, latency=200e-6, source="100 Mb/s Ethernet"),
    "wan-1g": Link(bandwidth=0.125 * GB, latency=30e-3, source="1 Gb/s between sites, 30 ms apart"),
    "wan-100m": Link(bandwidth=0.0125 * GB, latency=50e-3, source="100 Mb/s between sites, 50 ms apart"),
    "memory": Link(bandwidth=20 * GB, latency=20e-6, source="shared memory of one machine; calibrate measures it"),
}


def _preset(
    name: str,
    peaks: dict[str, float],
    memory: float,
    bandwidth: float,
    inside: str,
    between: str,
    *,
    source: str,
    watts: float | None = None,
    exponentials: float | None = None,
    context_bytes: float = CONTEXT_BYTES,
    devices_per_node: int = 8,
    is_usual: bool = True,
) -> Preset:
    device = Device(
        name=name,
        peak_flops={kind: value * TERA for kind, value in peaks.items()},
        memory_bytes=memory * GIB,
        memory_bandwidth=bandwidth * TERA,
        source=source,
        watts=watts,
        exponentials=None if exponentials is None else exponentials * TERA,
        context_bytes=context_bytes,
    )
    return Preset(device=device, inside=inside, between=between, devices_per_node=devices_per_node, is_usual=is_usual)


_PROCESS_BYTES = 0.3 * GIB
"""What a process has in a processor's own memory before its model: Python, torch and the trainer, 282 MiB with torch 2.13 (the
``rank_bytes`` of ``shoal calibrate``). There is no driver's context."""


# Exponentials: 16 in a clock of each multiprocessor (CUDA C++ Programming Guide, "Arithmetic Instructions"), twice as many on
# Blackwell Ultra (NVIDIA, "Making Softmax More Efficient with NVIDIA Blackwell Ultra").
# float32 is what its name says: torch rounds no operand to TF32 unless it is told to (torch.backends.cuda.matmul.allow_tf32 is
# False by default), so a float32 product runs at the plain rate, on an A100 an eighth of TF32's.
_V100 = {"float32": 15.7, "float16": 125.0}
_A100 = {"float32": 19.5, "tf32": 156.0, "bfloat16": 312.0, "float16": 312.0}
_H100 = {"float32": 66.9, "tf32": 494.7, "bfloat16": 989.4, "float16": 989.4, "float8": 1978.9}
# HGX B200 has 600 Tflop/s in float32 for eight, and HGX B300 the same (NVIDIA's HGX specifications, as resellers print them);
# the architecture brief of 2024 said 80 for one.
_B200 = {"float32": 75.0, "tf32": 1125.0, "bfloat16": 2250.0, "float16": 2250.0, "float8": 4500.0, "float4": 9000.0}
# 5,760 Tflop/s for 72 (nvidia.com, GB200 NVL72 specifications); the architecture brief of 2024 said 90 for one.
_GB200 = {"float32": 80.0, "tf32": 1250.0, "bfloat16": 2500.0, "float16": 2500.0, "float8": 5000.0, "float4": 10000.0}
# "6 PFLOPS" for 72 (nvidia.com, GB300 NVL72 specifications) is rounded, to 83 each; the 80 are what a provider prints of its own
# racks (verda.com, "NVIDIA GB300 NVL72: GPU Architecture & Performance"). Nothing of NVIDIA's with more digits was found.
_GB300 = {"float32": 80.0, "tf32": 1250.0, "bfloat16": 2500.0, "float16": 2500.0, "float8": 5000.0, "float4": 15000.0}
# 44 as the press had it from NVIDIA's sheet for partners; no sheet of NVIDIA's own was found.
_H20 = {"float32": 44.0, "tf32": 74.0, "bfloat16": 148.0, "float16": 148.0, "float8": 296.0}
# 91.6 (NVIDIA L40S data sheet).
_L40S = {"float32": 91.6, "tf32": 183.0, "bfloat16": 362.0, "float16": 362.0, "float8": 733.0}
_MI355X = {"float32": 157.3, "bfloat16": 2500.0, "float16": 2500.0, "float8": 5000.0, "float4": 10000.0}
# A die, half a module: torch has a device for each ("8 separate GPUs" of 4 modules: OLCF, "Frontier User Guide"; LUMI's page on
# LUMI-G says the same of hipGetDeviceCount). AMD's sheet has for a module 383.0 in 16 bit, 95.7 in float32 by matrices, which
# round nothing, 128 GB, 3.277 TB/s, and 560 W at most; the halves are derived.
_MI250X = {"float32": 95.7 / 2, "bfloat16": 383.0 / 2, "float16": 383.0 / 2}
# 163.4 by vectors and by matrices alike (AMD's footnote MI300-11, November 2023; MI300X data sheet).
_MI300X = {"float32": 163.4, "tf32": 653.7, "bfloat16": 1307.4, "float16": 1307.4, "float8": 2614.9}
# Of processors no sheet has peaks; they are derived: cores x clock x units x numbers in a register x 2, a multiply and an add.
# 16 float32 are in a register of 512 bits, and twice as many bfloat16 (AVX512_BF16). Tiles (AMX, 2,048 flops in a clock of a
# core) would be 16 times that, and not every server has them. 8 channels x 4,800 MT/s x 8 bytes are 307 GB/s.
_X86 = {"float32": 32 * 2.9e9 * 2 * 16 * 2 / TERA, "bfloat16": 32 * 2.9e9 * 2 * 32 * 2 / TERA}
# 4 float32 are in a register of 128 bits: 7.1, twice the float64 of half a Grace CPU Superchip (NVIDIA: 7.1 for its 144 cores). A
# BFMMLA does 16 products of bfloat16, on all four units (LLVM, AArch64SchedNeoverseV2.td).
_ARM = {"float32": 72 * 3.1e9 * 4 * 4 * 2 / TERA, "bfloat16": 72 * 3.1e9 * 4 * 16 * 2 / TERA}

_H100_PCIE = {kind: value * 756 / 989.4 for kind, value in _H100.items()}
_B300 = {**_B200, "float4": 13500.0}

# Name, peaks, GiB, TB/s, the links inside a node and between nodes.
PRESETS: dict[str, Preset] = {
    preset.device.name: preset
    for preset in (
        _preset("v100-16gb", _V100, 16, 0.9, "nvlink2", "infiniband-edr",
                watts=300, exponentials=1.96, source="NVIDIA V100 SXM2 data sheet"),
        _preset("v100-32gb", _V100, 32, 0.9, "nvlink2", "infiniband-edr",
                watts=300, exponentials=1.96, source="NVIDIA V100 SXM2 data sheet"),
        _preset("a100-40gb", _A100, 40, 1.555, "nvlink3", "infiniband-hdr",
                watts=400, exponentials=2.44, source="NVIDIA A100 SXM data sheet"),
        _preset("a100-80gb", _A100, 80, 2.039, "nvlink3", "infiniband-hdr",
                watts=400, exponentials=2.44, source="NVIDIA A100 SXM data sheet"),
        _preset("a100-40gb-pcie", _A100, 40, 1.555, "pcie4", "infiniband-hdr",
                watts=250, exponentials=2.44, source="NVIDIA A100 PCIe data sheet"),
        _preset("a100-80gb-pcie", _A100, 80, 1.935, "pcie4", "infiniband-hdr",
                watts=300, exponentials=2.44, source="NVIDIA A100 PCIe data sheet"),
        _preset("h100-80gb", _H100, 80, 3.35, "nvlink4", "infiniband-ndr",
                watts=700, exponentials=3.87, source="NVIDIA H100 SXM data sheet, without sparsity"),
        _preset("h100-96gb", _H100, 96, 2.46, "nvlink4", "infiniband-ndr",
                watts=500, exponentials=3.87, is_usual=False, source="NVIDIA H100 with six stacks of HBM2e at 3.2 Gb/s a pin"),
        _preset("h100-80gb-pcie", _H100_PCIE, 80, 2.0, "pcie5", "infiniband-ndr",
                watts=350, exponentials=3.2, source="NVIDIA H100 PCIe data sheet, without sparsity"),
        _preset("h800-80gb", _H100, 80, 3.35, "nvlink3-export", "infiniband-ndr",
                watts=700, exponentials=3.87, source="NVIDIA H800: an H100 with slower NVLink"),
        _preset("a800-80gb", _A100, 80, 2.039, "nvlink3-export", "infiniband-hdr",
                watts=400, exponentials=2.44, source="NVIDIA A800: an A100 with slower NVLink"),
        _preset("h20-96gb", _H20, 96, 4.0, "nvlink4", "infiniband-ndr",
                watts=400, exponentials=2.28, source="NVIDIA H20 data sheet, without sparsity"),
        _preset("gh200-96gb", _H100, 96, 4.0, "nvlink4", "infiniband-ndr",
                watts=700, exponentials=3.87, devices_per_node=4, source="NVIDIA GH200 data sheet, without sparsity"),
        _preset("l40s-48gb", _L40S, 48, 0.864, "pcie4", "infiniband-hdr",
                watts=350, exponentials=5.7, source="NVIDIA L40S data sheet, without sparsity"),
        _preset("h200-141gb", _H100, 141, 4.8, "nvlink4", "infiniband-ndr",
                watts=700, exponentials=3.87, source="NVIDIA H200 data sheet, without sparsity"),
        _preset("b200-180gb", _B200, 180, 7.7, "nvlink5", "infiniband-ndr",
                watts=1000, exponentials=4.5, source="NVIDIA DGX B200 data sheet, without sparsity"),
        _preset("gb200-186gb", _GB200, 186, 8.0, "nvlink5", "infiniband-ndr",
                watts=1200, exponentials=5.0, devices_per_node=72, source="NVIDIA GB200 NVL72 data sheet, without sparsity"),
        _preset("gb300-279gb", _GB300, 279, 8.0, "nvlink5", "infiniband-xdr",
                watts=1400, exponentials=10.0, devices_per_node=72, source="NVIDIA GB300 NVL72 data sheet, without sparsity"),
        _preset("b300-270gb", _B300, 270, 8.0, "nvlink5", "infiniband-xdr",
                watts=1100, exponentials=9.0, source="NVIDIA DGX B300 data sheet, without sparsity"),
        _preset("mi250x", _MI250X, 64, 3.277 / 2, "infinity-fabric-2", "slingshot-11",
                watts=560 / 2, source="AMD MI250X data sheet, half a module: one die (GCD)"),
        _preset("mi300x", _MI300X, 192, 5.3, "infinity-fabric", "infiniband-ndr",
                watts=750, source="AMD MI300X data sheet, without sparsity"),
        _preset("mi325x", _MI300X, 256, 6.0, "infinity-fabric", "infiniband-ndr",
                watts=1000, source="AMD MI325X data sheet, without sparsity"),
        _preset("mi355x", _MI355X, 288, 8.0, "infinity-fabric", "infiniband-ndr",
                watts=1400, source="AMD MI355X data sheet, without sparsity"),
        _preset("x86-server", _X86, 256, 0.307, "memory", "ethernet-100g",
                context_bytes=_PROCESS_BYTES, devices_per_node=2,
                source="a socket of 32 cores at 2.9 GHz, two AVX-512 units each, 8 channels of DDR5-4800"),
        _preset("arm-server", _ARM, 256, 0.5, "memory", "ethernet-100g",
                context_bytes=_PROCESS_BYTES, devices_per_node=2,
                source="a socket of 72 cores at 3.1 GHz, four 128-bit units each (NVIDIA Grace)"),
    )
}  # fmt: skip
_ALIASES = {
    "v100": "v100-32gb", "a100": "a100-80gb", "h100": "h100-80gb", "h200": "h200-141gb", "h800": "h800-80gb",
    "a800": "a800-80gb", "h20": "h20-96gb", "gh200": "gh200-96gb", "l40s": "l40s-48gb", "b200": "b200-180gb",
    "gb200": "gb200-186gb", "gb300": "gb300-279gb", "b300": "b300-270gb", "x86": "x86-server", "arm": "arm-server",
}  # fmt: skip


def find_preset(name: str, own: Iterable[str] = ()) -> Preset:
    """The preset of this name.

    Args:
        name: in any case.
        own: names of the user's own devices, which may have been meant.

    Raises:
        RequestError: there is none; offers the nearest names.
    """
    wanted = _ALIASES.get(name.lower(), name.lower())
    if wanted in PRESETS:
        return PRESETS[wanted]
    raise RequestError(f"{unknown_device(name, own)}, or give its numbers in [planner.devices.{name}]")


def unknown_device(name: str, own: Iterable[str] = ()) -> str:
    """What is wrong with the name of a device that nobody knows, with the nearest few that are known."""
    known = [*own, *PRESETS]
    return f"there is no device {name!r}; {offer(name.lower(), [*known, *_ALIASES])}there are {', '.join(known)}"


def build_cluster(text: str, own: Mapping[str, DeviceConfig] | None = None) -> Cluster:
    """The cluster that ``NAME:NODESxDEVICES`` says.

    Args:
        text: a preset or a name of ``own``, nodes, and devices of each.
        own: devices by the user's own numbers.

    Raises:
        RequestError: the text is something else, the device is unknown, or its link joins fewer than a node is said to have.
    """
    parts = parse_cluster(text)
    mine = {name.lower(): device for name, device in (own or {}).items()}
    if parts.preset in mine:
        return _own_cluster(parts, mine[parts.preset])
    preset = find_preset(parts.preset, mine)
    if parts.devices_per_node > preset.devices_per_node:
        nodes = -(-parts.num_nodes * parts.devices_per_node // preset.devices_per_node)
        raise RequestError(
            f"cluster {text!r} has {parts.devices_per_node} devices in a node, and {preset.inside} joins "
            f"{preset.devices_per_node} {preset.device.name} at most; write {parts.preset}:{nodes}x{preset.devices_per_node}, "
            f"or give the device and its links in [planner.devices.NAME]"
        )
    return cluster_of(preset, num_nodes=parts.num_nodes, devices_per_node=parts.devices_per_node)


def _own_cluster(parts: ClusterName, own: DeviceConfig) -> Cluster:
    source = f"[planner.devices.{parts.preset}]"
    device = Device(
        name=parts.preset,
        peak_flops={kind: value * TERA for kind, value in own.peak_tflops.items()},
        memory_bytes=own.memory_gib * GIB,
        memory_bandwidth=own.memory_gb_per_s * GB,
        source=source,
    )
    inner = Tier(
        name="link",
        devices=parts.devices_per_node,
        bandwidth=own.link_gb_per_s * GB,
        latency=own.link_latency_us * 1e-6,
        source=source,
    )
    outer = Tier(
        name="network",
        devices=parts.devices_per_node * parts.num_nodes,
        bandwidth=own.network_gb_per_s * GB,
        latency=own.network_latency_us * 1e-6,
        source=source,
    )
    return _joined(device, inner, outer, parts.num_nodes)


def cluster_of(preset: Preset, *, num_nodes: int, devices_per_node: int) -> Cluster:
    """Nodes of a preset, joined by its links."""
    inside, between = LINKS[preset.inside], LINKS[preset.between]
    inner = Tier(
        name=preset.inside,
        devices=devices_per_node,
        bandwidth=inside.bandwidth,
        latency=inside.latency,
        source=inside.source,
        is_mesh=inside.is_mesh,
    )
    outer = Tier(
        name=preset.between,
        devices=num_nodes * devices_per_node,
        bandwidth=between.bandwidth,
        latency=between.latency,
        source=between.source,
    )
    return _joined(preset.device, inner, outer, num_nodes)


def _joined(device: Device, inner: Tier, outer: Tier, num_nodes: int) -> Cluster:
    """Nodes with a link between them; of one node the link is remembered for the day when there are more."""
    if num_nodes > 1:
        return Cluster(device=device, tiers=(inner, outer))
    return Cluster(device=device, tiers=(inner,), beyond=outer)
