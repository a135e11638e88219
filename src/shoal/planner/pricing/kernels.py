"""How long one operation of a layer takes on a device: a matrix product by its shape, everything else by its bytes.

A kernel is what it computes plus what it reads and writes, one after the other (Calculon's ``no_overlap``, Isaev et al. 2023:
it fits A100 better than the larger of the two).
"""

from dataclasses import dataclass

from shoal.costs.layers import Layer, Op, OpKind, TensorSplit
from shoal.planner.hardware.devices import Device
from shoal.planner.hardware.software import Constants, Software

_ALIGNED = 8
"""Elements that a row of 16-bit operands must be a multiple of for tensor cores (NVIDIA, "Matrix multiplication background")."""
_MISALIGNED = 4.0
"""How many times as long a product of misaligned operands takes. The same document says that it is slower and not by how much:
by hand, between none and ``_PLAIN_CORES``, because newer libraries pad some of them."""
_PLAIN_CORES = 16.0
"""The same of batched products of heads, then done without tensor cores: 19.5 in place of 312 Tflop/s (A100 data sheet)."""
_FUSED_BACKWARD = 2.5
"""Products of a fused attention's backward pass per product of its forward pass: five for two (Dao 2023, arXiv:2307.08691,
section 4.1)."""
_MEMORY_BACKWARD = 1.5
"""What moves in the backward pass of an operation that only reads and writes, over its forward pass: the gradient and what was
kept are read and a gradient written, in place of one read and one write."""
_KERNELS_PER_EXPERT = 4.0
"""Kernels that an expert's product needs: the product, a cast of its operand, and a copy in and out of the group; counted in
Megatron's grouped experts before they were one kernel, and held to the rows of the calibration table that have experts."""
_NARROW = ("float8", "float4")


@dataclass(frozen=True, kw_only=True)
class Slice:
    """What one rank has of a layer."""

    samples: float
    """Of one microbatch."""
    tensor: int = 1
    sequence_parallel: bool = False
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    """Ranks that share each matrix of an expert."""


@dataclass(frozen=True)
class KernelTimes:
    """Seconds of a layer on the device, and the kernels that the host launches for it."""

    forward: float = 0.0
    input: float = 0.0
    weight: float = 0.0
    attention: float = 0.0
    """Of ``forward``."""
    pointwise: float = 0.0
    """Of ``forward``: what only reads and writes."""
    kernels: float = 0.0
    """Of the forward pass."""

    @property
    def backward(self) -> float:
        """Both halves."""
        return self.input + self.weight


def time_layer(
    layer: Layer,
    part: Slice,
    *,
    device: Device,
    precision: str,
    item_bytes: int,
    software: Software,
    constants: Constants,
) -> KernelTimes:
    """Seconds of one microbatch of a layer, all of whose operations run one after the other."""
    forward = by_input = by_weight = attention = pointwise = kernels = 0.0
    for op in layer.ops:
        if op.kind is OpKind.MATMUL:
            seconds = _product(op, part, device, precision, item_bytes, constants)
            forward += seconds
            by_input += seconds
            by_weight += seconds
            # Every expert's product, and the cast and the copies around it, is launched by itself.
            kernels += op.count if op.experts == 1 else op.count * _num_experts(op, part) * _KERNELS_PER_EXPERT
        elif op.kind is OpKind.ATTENTION:
            seconds = _attention(op, part, device, precision, item_bytes, constants)
            forward += seconds
            attention += seconds
            by_input += seconds * (_FUSED_BACKWARD if op.is_fused else 2.0)
            kernels += op.count * (1 if op.is_fused else 5)
        else:
            seconds = _memory(op, part, device, constants)
            forward += seconds
            pointwise += seconds
            by_input += _MEMORY_BACKWARD * seconds
            kernels += op.count
    return KernelTimes(forward, by_input, by_weight, attention, pointwise, kernels * software.kernels_per_op)


def _product(op: Op, part: Slice, device: Device, precision: str, item_bytes: int, constants: Constants) -> float:
    rows = op.rows * part.samples / part.context
    num_products = _num_experts(op, part)
    rows = rows / num_products
    tensor = part.tensor
    if op.experts > 1:
        # Experts that are whole have the positions of a sequence shared out instead.
        tensor, rows = part.expert_tensor, rows * part.expert_tensor / part.tensor
    inner = op.inner / tensor if op.cut is TensorSplit.ROWS else op.inner
    outer = op.outer / tensor if op.cut is TensorSplit.COLUMNS else op.outer
    flops = 2.0 * rows * inner * outer
    moved = (rows * inner + inner * outer + rows * outer) * item_bytes
    slow = _MISALIGNED if inner % _ALIGNED or outer % _ALIGNED else 1.0
    reached = constants.matmul * (constants.narrow if precision in _NARROW else 1.0)
    compute = flops * slow / (device.sustained_flops(precision) * reached)
    if precision in _NARROW:
        # The left operand is read in 16 bit and written in 8, as it is and transposed for the backward pass.
        moved += rows * inner * (2 + 1 + 1)
    # Of an attention that is not fused, every head has a product of its own.
    count = op.count / part.tensor if op.cut is TensorSplit.ALL else op.count
    return count * num_products * (compute + moved / (device.memory_bandwidth * constants.memory))


def _num_experts(op: Op, part: Slice) -> float:
    """Experts of one rank. Balanced: it has experts / ep of them, and their tokens from ep ranks."""
    return max(1.0, op.experts / part.expert)


def _attention(op: Op, part: Slice, device: Device, precision: str, item_bytes: int, constants: Constants) -> float:
    heads = op.heads / part.tensor
    rows, samples = op.rows / part.context, part.samples
    # Attention is done in 16 bit, whatever the products are.
    peak = device.sustained_flops(device.half_type if precision in _NARROW else precision)
    flops = 4.0 * rows * op.inner * op.outer * heads * samples
    if op.is_fused:
        # Between its two products every score waits for an exponential, of which newer devices have hardly more than old ones
        # (Shah et al. 2024, arXiv:2407.08608, section 3.1): what holds attention back is not what holds products back.
        waits = rows * op.outer * heads * samples / (device.softmax_rate * constants.attention)
        return op.count * (0.5 if op.causal else 1.0) * (flops / (peak * constants.matmul) + waits)
    # float32 has no tensor cores to miss.
    slow = _PLAIN_CORES if op.inner % _ALIGNED and precision not in ("float32", "float64") else 1.0
    moved = (op.num_bytes / part.tensor / part.context + 4 * rows * op.inner * heads * item_bytes) * samples
    return op.count * (flops * slow / (peak * constants.matmul) + moved / (device.memory_bandwidth * constants.memory))


def _memory(op: Op, part: Slice, device: Device, constants: Constants) -> float:
    divided = part.context * (part.tensor if op.cut is TensorSplit.ALL or part.sequence_parallel else 1)
    return op.count * op.num_bytes * part.samples / divided / (device.memory_bandwidth * constants.memory)
