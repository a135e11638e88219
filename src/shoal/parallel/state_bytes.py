"""Bytes of weights, gradients and optimizer state on one rank: predicted from shapes and a plan, and measured from real storages.

Both must agree to the byte. What a plan should need is then known before it runs, and a second copy of something is a difference.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.compression.build import build_back, build_codec
from shoal.compression.config import CompressionConfig
from shoal.compression.layout import TensorPart, cut_block, is_compressed, way_of, whole_blocks
from shoal.compression.traffic import state_bytes as compression_bytes
from shoal.core.compressrule import CompressRule
from shoal.optim.build import num_state_bytes
from shoal.optim.config import OptimConfig
from shoal.parallel.analysis.structure import ModuleAnalysis
from shoal.parallel.data import Reduction
from shoal.parallel.zero.apply import ZeroReduction, predict_pool
from shoal.parallel.zero.gradients import MOST_UNDER_WAY
from shoal.parallel.zero.layout import Pool, Slot, ZeroLayout, lay_out


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes that one rank keeps from step to step, and the buffers that units pass through."""

    weights: int
    gradients: int
    optimizer: int
    working: int = 0
    """Pool buffers: units gathered at stage 3, and buckets of gradients in flight at stages 2 and 3."""
    islands: int = 0
    """What a policy between islands keeps: agreed weights, momentum, changes in flight."""
    compression: int = 0
    """What compressed sums keep: residuals and the like, and the next state, which is made beside the last."""


def predict_state_bytes(
    model: nn.Module,
    *,
    analysis: ModuleAnalysis,
    stage: int,
    num_data_ranks: int,
    data_rank: int,
    num_microbatches: int,
    optim: OptimConfig,
    num_copies: int = 0,
    compress: tuple[CompressRule, CompressionConfig] | None = None,
    islands: tuple[int, int] | None = None,
    has_masters: bool = False,
    overlaps: bool = False,
) -> StateBytes:
    """What a rank will keep of a model's trainable parameters.

    Args:
        model: with the shapes that tensor parallelism leaves on this rank, before ``apply_zero``; may be on the meta device.
        analysis: names the blocks.
        stage: the plan's ``zero``.
        num_data_ranks: the plan's ``dp``.
        data_rank: this rank's place along it.
        num_microbatches: microbatches of one step.
        optim: the ``[optim]`` section.
        num_copies: that a policy between islands keeps of what the rank updates.
        compress: how gradients are compressed, or the changes of islands; None where nothing is.
        islands: how many there are and which is this rank's, where ``compress`` is of what they exchange.
        has_masters: weights are gathered by a codec, so that stages 1 and 2 keep float32 shards beside them.
        overlaps: the data axis spans hosts, so that units are gathered ahead and reduced while the next are computed, in buffers
            more than on one host.
    """
    trained = [parameter for _, parameter in sorted(model.named_parameters()) if parameter.requires_grad]
    itemsize = trained[0].element_size()
    residuals = 0
    if compress is not None and islands is None:
        parts = {name: TensorPart(tuple(one.shape)) for name, one in model.named_parameters() if one.requires_grad}
        residuals = compression_bytes(parts, *compress, num_ranks=num_data_ranks, rank=data_rank, is_sharded=stage > 0)
        if compress[0].kind == "onebit" and optim.name == "lamb":
            # A variance that goes on beside the frozen one.
            residuals += sum(one.nbytes for one in trained if one.ndim)
    if stage == 0:
        num_bytes = sum(parameter.nbytes for parameter in trained)
        state = num_state_bytes(optim, [parameter.numel() for parameter in trained], itemsize)
        copies = num_copies * num_bytes
        if compress is not None and islands is not None:
            parts = {name: TensorPart(tuple(one.shape)) for name, one in model.named_parameters() if one.requires_grad}
            residuals = compression_bytes(parts, *compress, num_ranks=islands[0], rank=islands[1])
        return StateBytes(
            weights=num_bytes, gradients=num_bytes, optimizer=state, compression=residuals, islands=copies
        )
    layout = lay_out(model, analysis, num_data_ranks)
    whole, shard = layout.size * itemsize, layout.shard_size(data_rank) * itemsize
    keeps_whole = stage == 1 or num_microbatches > 1 or (compress is not None and islands is None)
    if compress is not None and islands is not None:
        parts = _coded_shards(layout, data_rank, *compress)
        residuals = compression_bytes(parts, *compress, num_ranks=islands[0], rank=islands[1])
    pieces = [_rows_numel(slot, data_rank) for unit in layout.units for slot in unit.slots]
    working = 0 if keeps_whole else sum(_bucket_sizes(layout, MOST_UNDER_WAY if overlaps else 0))
    # What a codec gathers is not gathered ahead.
    working += sum(predict_pool(layout, prefetches=overlaps and not has_masters)) if stage == 3 else 0
    return StateBytes(
        weights=shard if stage == 3 else whole + (shard if has_masters else 0),
        gradients=whole if keeps_whole else shard,
        optimizer=num_state_bytes(optim, [numel for numel in pieces if numel], itemsize),
        working=working * itemsize,
        islands=num_copies * sum(pieces) * itemsize,
        compression=residuals,
    )


def _coded_shards(
    layout: ZeroLayout, rank: int, rule: CompressRule, config: CompressionConfig
) -> dict[str, TensorPart]:
    """What a rank codes of the parameters that it has rows of, between islands: whole blocks."""
    codec = build_codec(rule, config)
    is_blocks = codec is not None and way_of(rule) == "blocks"
    block = cut_block(codec, build_back(rule, config)) if codec is not None and is_blocks else 1
    found: dict[str, TensorPart] = {}
    for slot in (slot for unit in layout.units for slot in unit.slots):
        first, end = slot.rows(rank)
        if first < end:
            own = block if is_compressed(slot.shape, rule, config) else 1
            found[slot.name] = whole_blocks(slot.shape, first * slot.row, end * slot.row, own)
    return found


def measure_state_bytes(model: nn.Module, reduction: Reduction, optimizer: Optimizer) -> StateBytes:
    """What this rank really keeps, after a step has been taken: the bytes of storages, each counted once."""
    states = (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
    state_bytes = _storage_bytes(states)
    residuals = 0 if reduction.exchange is None else reduction.exchange.sums.num_state_bytes
    if isinstance(reduction, ZeroReduction):
        gradients, store = reduction.gradients, reduction.store
        return StateBytes(
            weights=_storage_bytes([reduction.weights, reduction.masters]),
            gradients=_storage_bytes(
                parameter.grad for parameter in reduction.updated.values() if parameter.grad is not None
            )
            if reduction.updated
            else gradients.buffer.nbytes,
            optimizer=state_bytes,
            working=gradients.num_pool_bytes + (store.num_pool_bytes if store is not None else 0),
            compression=residuals,
        )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # Not storages: buckets of data parallelism also carry the loss.
    grads = sum(parameter.grad.nbytes for parameter in trained if parameter.grad is not None)
    weights = sum(parameter.nbytes for parameter in trained)
    return StateBytes(weights=weights, gradients=grads, optimizer=state_bytes, compression=residuals)


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _rows_numel(slot: Slot, rank: int) -> int:
    first, end = slot.rows(rank)
    return (end - first) * slot.row


def _bucket_sizes(layout: ZeroLayout, most_under_way: int) -> list[int]:
    """Elements of the buckets of a backward pass in which each unit's gradients come together, but for the root's."""
    pool, under_way = Pool(layout.capacities()), list[int | None]()
    # A unit of one tensor without padding is reduced where autograd left its gradient.
    has_bucket = [not (len(unit.slots) == 1 and math.prod(unit.slots[0].shape) == unit.size) for unit in layout.units]
    if layout.root is not None and has_bucket[layout.root]:
        pool.take(layout.root)
    for index in reversed(range(len(layout.units))):
        if index != layout.root:
            under_way.append(pool.take(index)[0] if has_bucket[index] else None)
        while len(under_way) > most_under_way:
            place = under_way.pop(0)
            if place is not None:
                pool.let_go(place)
                pool.forget()
    return pool.sizes
