"""Bugs of the kind that users of big systems reported, each planted in the real path of a rank's process.

A bug returns what to replace and by what; ``catalogue.py`` puts it in place for one job and takes it out again. Each names the
line that it breaks by breaking it: when that line moves, the bug fails to apply, and the suite says so.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.comm.world import World
from shoal.core.axes import Axis
from shoal.engine import model as engine
from shoal.engine import parallelize, passes, piggyback
from shoal.parallel import batchnorm, data, gradnorm
from shoal.parallel import data as replicated
from shoal.parallel.context import apply as context
from shoal.parallel.context import ring
from shoal.parallel.tensor import vocabulary
from shoal.parallel.tensor.crossing import sum_out
from shoal.parallel.zero import apply as zero
from shoal.pipeline import deferred, share, versions
from shoal.trainer import loop


class Swap(NamedTuple):
    """One attribute to replace."""

    owner: Any
    name: str
    value: Any


PlantedBug = Callable[[World], list[Swap]]
_PIGGYBACK = torch.Size([piggyback.NUM_SCALARS])


def drop_all_reduce(world: World) -> list[Swap]:
    """Every replica keeps its own gradient."""
    return [_hook(lambda own, total, size: own)]


def average_over_replicas(world: World) -> list[Swap]:
    """A mean where the shares already add up: DDP's own default."""
    return [_hook(lambda own, total, size: total / size)]


def scale_summed_gradients(factor: float) -> PlantedBug:
    """Every gradient times a number, after the reduction: by tp, or by the number of microbatches."""

    def bug(world: World) -> list[Swap]:
        honest = replicated.ReplicaReduction.finish

        def finish(self: replicated.ReplicaReduction) -> None:
            honest(self)
            for parameter in self.updated.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

        return [Swap(replicated.ReplicaReduction, "finish", finish)]

    return bug


def scale_buckets_by_size(world: World) -> list[Swap]:
    """The sum over cp multiplied by cp, as a loss that every rank computes whole would need."""
    return [_hook(lambda own, total, size: total * size)]


def norm_of_own_shard(world: World) -> list[Swap]:
    """Each rank clips by the norm of what it holds."""
    return [Swap(gradnorm.WholeNorms, "_sum_", lambda self, entries: entries)]


def keep_partial_gradients(world: World) -> list[Swap]:
    """Norm weights inside a cut sequence keep the gradient of this rank's positions."""
    return [Swap(engine, "sum_partial_", lambda updated, names, channel: None)]


def count_padding(world: World) -> list[Swap]:
    """Rows that pad the vocabulary enter the loss as if they were tokens."""

    def real_scores(scores: Tensor, targets: Tensor, channel: Any, vocab: int) -> tuple[Tensor, Tensor, int]:
        rows = scores.shape[-1]
        return scores.reshape(-1, rows), targets.reshape(-1), channel.rank * rows

    return [Swap(vocabulary, "_real_scores", real_scores)]


def look_ahead_in_ring(world: World) -> list[Swap]:
    """Of a block from an earlier rank both chunks are seen, the late one too."""
    honest = ring.visible_part

    def visible_part(rank: int, source: int, *, causal: bool) -> ring.Part:
        return ring.Part() if causal and source < rank else honest(rank, source, causal=causal)

    return [Swap(ring, "visible_part", visible_part)]


def forget_positions(world: World) -> list[Swap]:
    """Rotary tables are read from 0 on every rank, whatever its positions are."""
    honest = context._Active.positions

    def positions(self: context._Active, length: int) -> Tensor:
        rows = honest(self, length)
        return rows - rows[0]

    return [Swap(context._Active, "positions", positions)]


def drop_grouped_heads(world: World) -> list[Swap]:
    """The gradient of a shared key-value head comes from one of its query heads."""
    honest = ring._Call.collect

    def collect(self: ring._Call, grad: Tensor) -> Tensor:
        if self.num_groups == 1:
            return honest(self, grad)
        return grad[:, :: self.num_groups].contiguous()

    return [Swap(ring._Call, "collect", collect)]


def drop_by_rank(world: World) -> list[Swap]:
    """Dropout masks depend on the rank."""
    honest = vars(parallelize)["apply_keyed_dropout"]
    return [Swap(parallelize, "apply_keyed_dropout", lambda model, seed: honest(model, seed + world.rank))]


def redraw_in_recompute(world: World) -> list[Swap]:
    """A recomputed forward pass draws other masks than the first."""
    honest = F.dropout
    keyed = vars(parallelize)["apply_keyed_dropout"]

    def apply(model: nn.Module, seed: int) -> Any:
        key = keyed(model, seed)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.__dict__["forward"] = functools.partial(_redraw, module.forward, honest, module.p)
        return key

    return [Swap(parallelize, "apply_keyed_dropout", apply)]


def _redraw(forward: Callable[..., Tensor], dropout: Callable[..., Tensor], p: float, x: Tensor) -> Tensor:
    is_again = torch._C._current_graph_task_id() != -1
    return dropout(x, p, True) if is_again else forward(x)


def swap_optimizer_shards(world: World) -> list[Swap]:
    """After the first step one tensor's first moment is the neighbour's."""
    honest = engine.ParallelModel.train_step
    seen: list[int] = []

    def train_step(self: engine.ParallelModel, *arguments: Any, **options: Any) -> Any:
        result = honest(self, *arguments, **options)
        if not seen:
            seen.append(1)
            placements = self.reduction.placements
            even = [name for name, place in placements.items() if 2 * place.local_shape[0] == place.whole_shape[0]]
            state = self.optimizer.state[self.reduction.updated[even[0]]]["exp_avg"]
            received = torch.empty_like(state)
            self.mesh.channel(Axis.DATA).ring_shift(state.contiguous(), received)
            state.copy_(received)
        return result

    return [Swap(engine.ParallelModel, "train_step", train_step)]


def average_unequal_batches(world: World) -> list[Swap]:
    """A mean of the replicas' means, although they have different numbers of targets."""

    def total(self: passes.Passes, batch: Any) -> float:
        return float(max(1.0, batch.local_weight)) * self.mesh.degree(Axis.DATA)

    return [Swap(passes.Passes, "total_weight", total)]


def keep_own_statistics(world: World) -> list[Swap]:
    """Running statistics of batch norm are folded from this replica's microbatches only."""

    def rows(layers: Any) -> Tensor:
        num_own = max((index + 1 for layer in layers for index in layer.notes), default=0)
        return batchnorm._own_rows(layers, num_own)

    return [Swap(batchnorm, "_global_rows", rows)]


def lose_tied_use(world: World) -> list[Swap]:
    """Of a tied weight only the output layer's use gives a gradient."""

    def forward(self: vocabulary.SplitEmbedding, input: Tensor) -> Tensor:
        local = input - self.start
        is_elsewhere = (local < 0) | (local >= self.weight.shape[0])
        rows = F.embedding(local.masked_fill(is_elsewhere, 0), self.weight.detach(), self.padding_idx)
        return sum_out(rows.masked_fill(is_elsewhere.unsqueeze(-1), 0.0), self.channel)

    return [Swap(vocabulary.SplitEmbedding, "forward", forward)]


def clip_by_stale_norm(world: World) -> list[Swap]:
    """Gradients are clipped by the norm of the step before."""
    honest = vars(engine)["clip_"]
    before: list[float] = []

    def clip(grads: Iterable[Tensor], norm: float, limit: float | None, loss_scale: float = 1.0) -> None:
        honest(grads, before[-1] if before else norm, limit, loss_scale)
        before.append(norm)

    return [Swap(engine, "clip_", clip)]


def update_by_noise_and_more(world: World) -> list[Swap]:
    """A weight whose true gradient is zero is updated by a gradient that is tiny, and yet no rounding."""
    honest = vars(engine)["clip_"]

    def clip(grads: Iterable[Tensor], norm: float, limit: float | None, loss_scale: float = 1.0) -> None:
        found = list(grads)
        honest(found, norm, limit, loss_scale)
        for gradient in found:
            if float(gradient.norm()) <= 1e-12 * norm:
                gradient.add_(1e-9 * norm)

    return [Swap(engine, "clip_", clip)]


def update_further_than_noise(world: World) -> list[Swap]:
    """A weight whose true gradient is zero goes as far in a step as one that has a gradient."""
    honest = replicated.ReplicaReduction.publish

    def publish(self: replicated.ReplicaReduction) -> None:
        found = [(one, one.grad) for one in self.updated.values() if one.grad is not None]
        largest = max(float(gradient.norm()) for _, gradient in found)
        for parameter, gradient in found:
            if float(gradient.norm()) <= 1e-12 * largest:
                # Not where no sample reached it: there it should not move at all, which any comparison sees.
                parameter.data.sub_(1e-3 * gradient.sign())
        honest(self)

    return [Swap(replicated.ReplicaReduction, "publish", publish)]


def keep_old_weights(world: World) -> list[Swap]:
    """What this rank updated never reaches the other replicas' forward passes."""
    return [Swap(zero.ZeroReduction, "publish", lambda self: None)]


def repeat_data(world: World) -> list[Swap]:
    """Every replica reads the first one's samples."""
    honest = vars(loop)["Loader"]
    return [Swap(loop, "Loader", lambda *arguments, **options: honest(*arguments, **{**options, "replica": 0}))]


def sum_once_more(world: World) -> list[Swap]:
    """A collective that changes nothing and costs a round: the sum of zeros."""
    honest = engine.ParallelModel._sum_gradients

    def summed(self: engine.ParallelModel, number: int) -> None:
        honest(self, number)
        self.mesh.everyone.all_reduce_(torch.zeros(16))

    return [Swap(engine.ParallelModel, "_sum_gradients", summed)]


def _hook(change: Callable[[Tensor, Tensor, int], Tensor]) -> Swap:
    """Change what the reduction makes of every gradient: ``change(own, sum, number of replicas)``.

    The loss and the request to stop, which are piggybacked in the same buckets, stay right: the gradients must give it away.
    """
    honest = data._sum_bucket

    # DDP refuses a hook whose annotations are not those it knows.
    @functools.wraps(honest)
    def changed(channel: Any, bucket: Any) -> Any:
        gradients = [gradient for gradient in bucket.gradients() if gradient.shape != _PIGGYBACK]
        own = [gradient.clone() for gradient in gradients]

        def alter(done: Any) -> Tensor:
            for gradient, before in zip(gradients, own, strict=True):
                gradient.copy_(change(before, gradient, channel.size))
            buffer: Tensor = bucket.buffer()
            return buffer

        return honest(channel, bucket).then(alter)

    return Swap(data, "_sum_bucket", changed)


def use_older_version(world: World) -> list[Swap]:
    """Every microbatch of a stage computes with the version before the one that is its."""
    honest = versions.VersionRule.used

    def used(self: versions.VersionRule, stage: int, microbatch: int) -> int:
        return max(0, honest(self, stage, microbatch) - 1)

    return [Swap(versions.VersionRule, "used", used)]


def miss_stash(world: World) -> list[Swap]:
    """A version is the parameters themselves, which the optimizer writes to before the backward pass has read them."""

    def copy(self: versions.Versions) -> dict[str, Tensor]:
        return {name: parameter.data.requires_grad_() for name, parameter in self.parameters.items()}

    return [Swap(versions.Versions, "_copy", copy)]


def use_newest_on_last_stage(world: World) -> list[Swap]:
    """Vertical sync forgotten on the last stage: it computes with its newest weights, as plain stashing does."""
    honest = versions.VersionRule.used

    def used(self: versions.VersionRule, stage: int, microbatch: int) -> int:
        return microbatch if stage == self.num_stages - 1 else honest(self, stage, microbatch)

    return [Swap(versions.VersionRule, "used", used)]


def swap_microbatches(world: World) -> list[Swap]:
    """The first stage runs microbatch 1 where 0 is due, and 0 where 1 is."""
    honest = passes.StepFeed.inputs

    def inputs(self: passes.StepFeed, microbatch: int) -> Any:
        return honest(self, microbatch ^ 1 if microbatch < 2 else microbatch)

    return [Swap(passes.StepFeed, "inputs", inputs)]


def keep_own_tied_sum(world: World) -> list[Swap]:
    """Of a weight that several stages, or several ranks of one, hold, a rank takes what the others have for nothing."""
    honest = share.Shared._exchange

    def exchange(self: share.Shared) -> Any:
        arrived = honest(self)
        for parts in arrived.values():
            for part in parts.values():
                if part is not None:
                    part.zero_()
        return arrived

    return [Swap(share.Shared, "_exchange", exchange)]


def lose_deferred_gradient(world: World) -> list[Swap]:
    """The second part of one microbatch's backward pass is not run."""
    honest = deferred.Later.run
    seen: list[int] = []

    def run(self: deferred.Later) -> None:
        seen.append(1)
        if len(seen) == 2:
            self._products.clear()
        honest(self)

    return [Swap(deferred.Later, "run", run)]
