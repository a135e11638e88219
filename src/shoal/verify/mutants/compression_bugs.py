"""Bugs of compressed sums that people met, or nearly met, in systems that have them, planted as in ``planted_bugs.py``."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.comm.channel import Channel
from shoal.compression import blocks, exchange
from shoal.compression.codec import Codec, Encoded, Payload
from shoal.compression.dgc import DGCState
from shoal.compression.exchange import CompressedSum
from shoal.compression.layout import Piece
from shoal.compression.sign import Sign
from shoal.core.compressrule import CompressRule
from shoal.parallel import onebit
from shoal.parallel.zero.quantized import WeightCodec
from shoal.verify.mutants.mutant import Mutant
from shoal.verify.mutants.planted_bugs import Honest, PlantedBug, replaces


def forget_memory(what: str) -> PlantedBug:
    """What a sum leaves is never kept: the memory stays as it was at the start."""

    @replaces(CompressedSum, "commit")
    def drop(honest: Honest, self: CompressedSum) -> None:
        for name, found in self._pending.get(what, {}).items():
            found.copy_(self._state[what][name])
        honest(self)

    return drop


@replaces(CompressedSum, "commit")
def add_to_memory(honest: Honest, self: CompressedSum) -> None:
    """The error memory is added to and never cleared."""
    for name, lost in self._pending.get("residual", {}).items():
        lost.add_(self._state["residual"][name])
    honest(self)


@replaces(CompressedSum, "_compensate_")
def use_memory_of_other_shard(honest: Honest, self: CompressedSum, flats: Mapping[str, Tensor]) -> None:
    """A gradient gets the residual of the other half of its tensor."""
    for name, flat in flats.items():
        residual = self._state["residual"][name]
        flat.add_(residual.roll(residual.numel() // 2))


@replaces(Sign, "encode")
def take_zero_for_negative(
    honest: Honest, self: Sign, flat: Tensor, *, key: int = 0, offset: int = 0, out: Payload | None = None
) -> Encoded:
    """The sign of a zero is minus: rows that no sample touched move the other way."""
    found: Encoded = honest(self, flat.masked_fill(flat == 0, -(2.0**-149)), key=key, offset=offset, out=out)
    return found


@replaces(blocks, "scale_rows_")
def use_scale_of_other_block(honest: Honest, flat: Tensor, scales: Tensor, offset: int, block: int) -> Tensor:
    """A block is decoded with its neighbour's scale."""
    found: Tensor = honest(flat, scales.roll(1), offset, block)
    return found


@replaces(CompressedSum, "begin_step")
def ignore_warm_up(honest: Honest, self: CompressedSum, number: int) -> None:
    """Steps before the first that is to be compressed are compressed too."""
    honest(self, max(number, self.rule.start))


@replaces(exchange, "is_compressed")
def compress_norms(honest: Honest, shape: Sequence[int], rule: CompressRule, config: object) -> bool:
    """Norms and biases go compressed as matrices do."""
    return True


@replaces(CompressedSum, "_keys")
def round_back_by_other_key(honest: Honest, self: CompressedSum, pieces: Sequence[Piece], who: str) -> list[int]:
    """The sum is rounded with the draws that a replica's gradient was rounded with."""
    found: list[int] = honest(self, pieces, "0" if who == "sum" else who)
    return found


@replaces(exchange, "pack_all")
def send_places_of_other_tensor(honest: Honest, payloads: Sequence[Encoded], device: torch.device) -> Tensor:
    """Of tensors of one size, each goes with the places of the one before it."""
    sent = list(payloads)
    for index in range(1, len(sent)):
        values, places = payloads[index].payload[0], payloads[index - 1].payload[1]
        if len(values) == len(places):
            sent[index] = replace(payloads[index], payload=(values, places))
    found: Tensor = honest(sent, device)
    return found


@replaces(exchange, "send")
def keep_sent_momentum(honest: Honest, state: DGCState, ratio: float) -> tuple[Encoded, DGCState]:
    """DGC's momentum is not masked where it was sent (Lin et al. 2018, equation 7, left out)."""
    encoded, after = honest(state, ratio)
    return encoded, replace(after, momentum=state.momentum)


@replaces(CompressedSum, "_return_encoded")
def keep_exact_own_slice(
    honest: Honest,
    self: CompressedSum,
    codec: Codec,
    pieces: Sequence[Sequence[Piece]],
    totals: Sequence[Tensor],
    flats: Mapping[str, Tensor],
) -> None:
    """The rank that adds a slice up keeps it as it was added, and the others what they decode: replicas drift apart."""
    exact = [total.clone() for total in totals]
    honest(self, codec, pieces, totals, flats)
    for piece, total in zip(pieces[self.channel.rank], exact, strict=True):
        flats[piece.name][piece.start : piece.stop] = total


@replaces(CompressedSum, "_add_messages")
def add_in_other_order(
    honest: Honest,
    self: CompressedSum,
    codec: Codec,
    received: Sequence[Tensor],
    pieces: Sequence[Piece],
    flats: Mapping[str, Tensor],
) -> list[Tensor]:
    """A slice is added up as messages came, here the first rank's last."""
    found: list[Tensor] = honest(self, codec, [*received[1:], received[0]], pieces, flats)
    return found


@replaces(CompressedSum, "_sum_factors")
def take_sum_from_memory(honest: Honest, self: CompressedSum, flats: Mapping[str, Tensor]) -> None:
    """PowerSGD's error memory is a replica's own matrix without the sum of all, where it is without the mean."""
    wanted = {name: flat + self._state["residual"][name] for name, flat in flats.items()}
    honest(self, flats)
    for name, flat in flats.items():
        self._pending["residual"][name].copy_(wanted[name] - flat)


@replaces(onebit.MomentumSums, "update")
def keep_variance_moving(honest: Honest, self: onebit.MomentumSums, optimizer: Optimizer) -> None:
    """The variance follows the momentum where it is to stay as it was."""
    honest(self, optimizer)
    for group in optimizer.param_groups:
        for weight in group["params"]:
            moments = optimizer.state[weight]
            moments["exp_avg_sq"].lerp_(moments["exp_avg"].square(), 1 - group["betas"][1])


@replaces(onebit, "move")
def move_by_share(honest: Honest, momentum: Tensor, gradient: Tensor, beta1: float) -> Tensor:
    """A replica moves the momentum by its share of the mean gradient, half of its own mean."""
    found: Tensor = honest(momentum, gradient / 2, beta1)
    return found


@replaces(WeightCodec, "gather")
def read_own_shard_exactly(
    honest: Honest, self: WeightCodec, index: int, shard: Tensor, whole: Tensor, channel: Channel
) -> None:
    """A rank reads its own rows as they are and those of others as they arrive."""
    honest(self, index, shard, whole, channel)
    for rows in self._rows[index][channel.rank]:
        whole[rows.in_unit : rows.in_unit + rows.numel] = shard[rows.in_shard : rows.in_shard + rows.numel]


@replaces(WeightCodec, "gather")
def train_gathered_weights(
    honest: Honest, self: WeightCodec, index: int, shard: Tensor, whole: Tensor, channel: Channel
) -> None:
    """The weights that are trained are rounded too, so that small steps are lost."""
    honest(self, index, shard, whole, channel)
    for rows in self._rows[index][channel.rank]:
        shard.data[rows.in_shard : rows.in_shard + rows.numel] = whole[rows.in_unit : rows.in_unit + rows.numel]


COMPRESSED: Sequence[Mutant] = (
    Mutant("error memory never kept", "dp=2 compress=int4", "optimizer", forget_memory("residual")),
    Mutant("error memory not cleared", "dp=2 compress=topk:0.05", "optimizer", add_to_memory),
    Mutant(
        "error memory of another shard",
        "dp=2 zero=1 compress=int4",
        "grad",
        use_memory_of_other_shard,
    ),
    Mutant("sign of a zero is minus", "dp=2 compress=sign", "grad", take_zero_for_negative),
    Mutant("scale of another block", "dp=2 compress=int8", "grad", use_scale_of_other_block),
    Mutant(
        "compressed before the first step that is to be",
        "dp=2 compress=int8@2",
        "grad",
        ignore_warm_up,
    ),
    Mutant("compression applied to a norm", "dp=2 compress=int4", "grad", compress_norms),
    Mutant(
        "error memory of the sum forgotten",
        "dp=2 compress=int4",
        "optimizer",
        forget_memory("sum_residual"),
    ),
    Mutant(
        "requantised with the wrong key",
        "dp=2 compress=int8",
        "grad",
        round_back_by_other_key,
        overrides=("compression.round=keyed",),
    ),
    Mutant(
        "sum kept exact by the rank that adds it up",
        "dp=2 compress=int8",
        "grad",
        keep_exact_own_slice,
    ),
    Mutant(
        "compressed gradients added in the order of arrival",
        "dp=3 compress=fp8",
        "grad",
        add_in_other_order,
        overrides=("train.global_batch=12",),
    ),
    Mutant(
        "PowerSGD without a warm start",
        "dp=2 compress=powersgd:2",
        "optimizer",
        forget_memory("right"),
        reported="GRACE, PowerSGDMemory",
    ),
    Mutant(
        "error memory of PowerSGD without the sum",
        "dp=2 compress=powersgd:2",
        "optimizer",
        take_sum_from_memory,
    ),
    Mutant("places of another tensor", "dp=2 compress=topk:0.05", "grad", send_places_of_other_tensor),
    Mutant("momentum of DGC not masked", "dp=2 compress=dgc:0.02", "optimizer", keep_sent_momentum),
    Mutant(
        "variance of 1-bit Adam not frozen",
        "dp=2 compress=onebit@2",
        "optimizer",
        keep_variance_moving,
        overrides=("optim.name=adamw",),
    ),
    Mutant(
        "momentum of 1-bit Adam moved by a share of the gradient",
        "dp=2 compress=onebit@2",
        "grad",
        move_by_share,
        overrides=("optim.name=adamw",),
    ),
    Mutant(
        "own shard of weights read as it is",
        "dp=2 zero=1",
        "loss",
        read_own_shard_exactly,
        overrides=("compression.weights=int4",),
    ),
    Mutant(
        "weights replaced by what was gathered of them",
        "dp=2 zero=3",
        "loss or weight",
        train_gathered_weights,
        overrides=("compression.weights=int4",),
    ),
)
"""Each with the plan under which it shows."""
