"""What of a device's data sheet a software reaches: at most six constants for each device and software, fitted, with provenance.

What a software *does* (whether it overlaps, what it keeps in which type) is written down here by hand, from its documentation
and, for bytes and kernels that no document states, from the residuals of the calibration table. How *fast* it does it is in
``constants.json``, written by ``benchmarks/planner/fit.py``, never by hand.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from importlib.resources import files
from typing import Any

from shoal.core.errors import RequestError, did_you_mean


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What is reached of the data sheet. At most six are fitted for a stack; the others keep the values here."""

    matmul: float = 0.85
    """Share of what a device sustains that a large matrix product reaches."""
    memory: float = 0.75
    """Share of the memory's bandwidth that a kernel reaches which only reads and writes."""
    launch: float = 12e-6
    """Seconds that the host needs for one kernel; a device that is quicker waits for it."""
    link: float = 0.6
    """Share of the bandwidth that a collective reaches inside a node."""
    network: float = 0.6
    """Share of the bandwidth that a collective reaches between nodes."""
    attention: float = 0.7
    """Share of a device's exponentials that a fused attention reaches while its products wait: FlashAttention-2 then runs at 180
    Tflop/s on an A100 and 400 on an H100, with heads of 128 (arXiv:2307.08691, Fig. 5; arXiv:2407.08608, Fig. 5)."""
    narrow: float = 0.8
    """What a product in fewer than 16 bits reaches of its own peak, over what one in 16 bits does: its operands are scaled and
    cast; above 1 where power holds the wider one back more."""
    reserve: float = 0.05
    """What the caching allocator holds beyond what is allocated, as a share of that."""
    sync: float = 1e-4
    """Seconds by which the ranks of a collective inside a layer miss each other, for every doubling of their number."""

    def as_dict(self) -> dict[str, float]:
        """By name."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


@dataclass(frozen=True, kw_only=True)
class Software:
    """What a training software does, as far as time and memory depend on it."""

    name: str
    source: str
    """Where this is known from."""
    overlaps_reduce: bool = True
    """Gradients are reduced while the last backward passes go on."""
    overlaps_gather: bool = True
    """Sharded weights are gathered ahead of the layer that needs them."""
    reduces_once: bool = False
    """Under accumulation ZeRO 2 and 3 keep gradients whole and reduce them with the last microbatch, not with each."""
    overlaps_transfer: bool = False
    """Activations travel between stages while the next microbatch is computed."""
    scatters_transfer: bool = False
    """Tensor-parallel ranks, which all have the same activation, each send a part of it (Narayanan et al. 2021, section 4.1)."""
    overlaps_tensor: float = 0.0
    """Share of tensor-parallel communication that is hidden behind matrix products."""
    reduced_bytes: float = 4.0
    """Bytes of a gradient as it travels."""
    reduced_bytes_bfloat16: float | None = None
    """The same in bfloat16, where that differs."""
    gradient_bytes: float = 4.0
    """Bytes that stay allocated for a gradient, all its copies together."""
    gradient_bytes_bfloat16: float | None = None
    """The same in bfloat16, where that differs: gradients are then added up in float32 beside those that autograd makes."""
    state_bytes: float = 12.0
    """Bytes of Adam's state for a weight: a float32 weight, two moments, and a float32 gradient where it keeps one."""
    keeps_wide: bool = False
    """Weights are kept in float32 alone, whatever passes compute in (autocast, or cast when they are gathered)."""
    keeps_gathered: bool = False
    """Under a pipeline, weights that ZeRO-3 gathered stay until the step is over, and are not gathered for every microbatch."""
    shards_context: bool = False
    """ZeRO cuts along ``cp`` too, whose ranks have the same weights as replicas have."""
    replays: bool = False
    """A whole step is captured once and replayed: the host launches no kernel, and ranks do not wait for each other's hosts."""
    overlaps_exchange: bool = False
    """Tokens travel to experts and back while another microbatch is computed."""
    fitted_as: str = ""
    """The software whose constants it has, where its own are not fitted apart."""
    apart: Mapping[str, float] = field(default_factory=dict)
    """Constants in which it differs from that one."""
    splits_experts: bool = True
    """Tensor-parallel ranks share each expert's matrices; if not, they are among the ranks that share the experts."""
    sends_once: bool = False
    """A token that goes to several experts of a node travels there once."""
    keeps_narrow: bool = False
    """What a product in fewer than 16 bits reads is kept for the backward pass in as many bits (Transformer Engine's guide, "FP8
    primer")."""
    fused_attention: bool = True
    fused_loss: bool = True
    fused_pointwise: bool = True
    """What stands between two products is one kernel; only of gated blocks, see ``TransformerShape``."""
    gathered_bytes: float | None = None
    """Bytes of a weight as ZeRO gathers it; as it is kept when left out."""
    shard_group: int = 0
    """Ranks over which ZeRO cuts, where groups of them hold the same; 0 for all that have the same weights."""
    selects_products: bool = False
    """Selective recompute keeps every second product's result and computes the rest again, where others compute attention
    again."""
    kernels_per_op: float = 1.0
    """Kernels that the host launches for one operation of a chain."""

    @property
    def fitted_name(self) -> str:
        """The software whose constants it has."""
        return self.fitted_as or self.name


SOFTWARE: dict[str, Software] = {
    software.name: software
    for software in (
        Software(
            name="shoal",
            source="this repository (parallel/zero/apply.py), with torch's own norms and loss; no accelerator has run it",
            overlaps_reduce=False,
            overlaps_gather=False,
            reduces_once=True,
            overlaps_transfer=True,  # pipeline/p2p.py sends without waiting, pipeline/runtime.py receives ahead
            keeps_wide=True,
            fused_loss=False,
            kernels_per_op=2.0,
        ),
        Software(
            name="megatron-deepspeed",
            source="microsoft/Megatron-DeepSpeed: PipelineEngine reduces after the last microbatch, and partitions what it sends "
            "over tensor-parallel ranks (is_pipe_partitioned, is_grad_partitioned)",
            overlaps_reduce=False,
            overlaps_gather=False,
            scatters_transfer=True,
            reduced_bytes=2.0,
            gradient_bytes_bfloat16=8.0,
            state_bytes=16.0,
            fused_attention=False,
            fused_loss=False,
            kernels_per_op=2.0,
        ),
        Software(
            name="bigscience",
            # What is written to differ from the fork above has no formula; its constants take it up (benchmarks/planner).
            source="bigscience-workshop/Megatron-DeepSpeed, 2021 and 2022: ZeRO-1, in bfloat16 as an optimizer of its own, "
            "fused softmax, PipelineEngine as above; BLOOM's job script has a norm after the embedding, ALiBi, and launches "
            "that wait for their kernels (bigscience-workshop/bigscience: train/tr11-176B-ml/tr11-176B-ml.slurm)",
            overlaps_reduce=False,
            overlaps_gather=False,
            scatters_transfer=True,
            reduced_bytes=2.0,
            gradient_bytes_bfloat16=8.0,
            state_bytes=16.0,
            fused_attention=False,
            fused_loss=False,
            kernels_per_op=2.0,
        ),
        Software(
            name="megatron",
            source="NVIDIA/Megatron-LM until 2022: local DDP reduces gradients after the last microbatch, in float32 only where "
            "--accumulate-allreduce-grads-in-fp32 says so, which bfloat16 alone does by itself (arguments.py)",
            overlaps_reduce=False,
            reduced_bytes=2.0,
            reduced_bytes_bfloat16=4.0,
            scatters_transfer=True,
            fused_attention=False,
            fused_loss=False,
            kernels_per_op=1.5,
        ),
        Software(
            name="megatron-core",
            source="NVIDIA/Megatron-LM core with Transformer Engine; its optimizer is sharded along dp and cp "
            "(docs: dist_optimizer), its guide to experts sets expert tensor parallelism to 1",
            overlaps_transfer=True,
            scatters_transfer=True,
            overlaps_tensor=0.5,
            shards_context=True,
            splits_experts=False,
            sends_once=True,
            keeps_narrow=True,
        ),
        Software(
            name="megatron-core-graphs",
            source="Megatron-Bridge 0.5 (NeMo 26.06), experts in MXFP8: CUDA graphs of whole steps, exchange overlapped, "
            "products of experts as one kernel (NVIDIA-NeMo/Megatron-Bridge: release notes of 0.5.1, pulls 3983 and 4606)",
            overlaps_transfer=True,
            scatters_transfer=True,
            overlaps_tensor=0.5,
            shards_context=True,
            splits_experts=False,
            sends_once=True,
            keeps_narrow=True,
            replays=True,
            overlaps_exchange=True,
            fitted_as="megatron-core",
        ),
        Software(
            name="fsdp",
            source="PyTorch FSDP as llm-foundry uses it, whose mesh of shards is dp x cp; shards are float32, with Adam's two "
            "moments beside them, and cast when they are gathered",
            shards_context=True,
            keeps_wide=True,
            gathered_bytes=2.0,
            state_bytes=8.0,
            reduced_bytes=2.0,
            keeps_gathered=True,
        ),
        Software(
            name="torchtitan",
            source="pytorch/torchtitan: FSDP2, which reduces in float32 (mixed_precision_reduce); blocks compiled, which fuses "
            "casts into what is before them; scaled_dot_product_attention, which is FlashAttention-2; llm-foundry's runs are "
            "from before the last two. Its selective recompute is by operation (selective_ac_option: op)",
            shards_context=True,
            keeps_wide=True,
            gathered_bytes=2.0,
            state_bytes=8.0,
            reduced_bytes=4.0,
            keeps_gathered=True,
            selects_products=True,
            fitted_as="fsdp",
            apart={"attention": Constants.attention, "narrow": 1.0},
        ),
    )
}


def find_software(name: str) -> Software:
    """A software that a recipe names.

    Raises:
        RequestError: there is none of that name.
    """
    if name not in SOFTWARE:
        raise RequestError(f"planner.software is {name!r}; {did_you_mean(name, SOFTWARE)}")
    return SOFTWARE[name]


@dataclass(frozen=True, kw_only=True)
class Covered:
    """What the rows were like that a stack was fitted on."""

    numbers: Mapping[str, tuple[float, float]]
    """The least and the most of devices, tokens of a sample, width and degrees."""
    precisions: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A software on a device."""

    software: Software
    constants: Constants
    is_fitted: bool
    """False where no run of this software on this device was there to fit, and constants of its nearest relative stand in."""
    fitted_on: str = ""
    covered: Covered | None = None
    """None where nothing was fitted, or nobody wrote down on what."""


_ENOUGH = 2
"""Rows from which on a device has constants of its own and counts as calibrated."""


_CHIPS = {"h200": "h100", "h800": "h100", "gh200": "h100", "a800": "a100"}
"""Devices that are another one with other memory or links."""


def chip_of(device: str) -> str:
    """The family of a device; devices of one are fitted together."""
    family = device.partition("-")[0]
    return _CHIPS.get(family, family)


def same_chip(device: str, others: Iterable[str]) -> list[str]:
    """Those of some devices that have the same chip: the nearest relatives of one that was not fitted."""
    return [other for other in others if chip_of(other) == chip_of(device)]


@lru_cache(maxsize=1)
def _stored() -> Mapping[str, Any]:
    content = files("shoal.planner.hardware").joinpath("constants.json").read_text(encoding="utf-8")
    loaded: Mapping[str, Any] = json.loads(content)
    return loaded


def constants_of(software: Software, fitted: Constants) -> Constants:
    """The constants of a software, from those of the one that it is fitted as."""
    return replace(fitted, **software.apart)


def _covered(page: Mapping[str, Any] | None) -> Covered | None:
    if page is None:
        return None
    numbers = {name: (low, high) for name, (low, high) in page["numbers"].items()}
    return Covered(numbers=numbers, precisions=tuple(page["precisions"]))


def find_stack(software: Software, device: str) -> Stack:
    """The constants of a software on a device, or of the nearest relative that was fitted.

    Args:
        software: by itself, or as it was used.
        device: a preset's name.
    """
    entries = _stored()["stacks"]
    fitted = software.fitted_name
    alike = (f"{fitted}/{other}" for other in same_chip(device, [name.partition("/")[2] for name in entries]))
    for candidate in (f"{fitted}/{device}", *alike, f"{fitted}/*", f"*/{device}", "*/*"):
        if candidate in entries:
            entry = entries[candidate]
            return Stack(
                software=software,
                constants=constants_of(software, Constants(**entry["constants"])),
                is_fitted=candidate == f"{fitted}/{device}" and entry["rows"] >= _ENOUGH,
                fitted_on=entry["fitted_on"],
                covered=_covered(entry.get("covered")),
            )
    return Stack(software=software, constants=Constants(), is_fitted=False)
