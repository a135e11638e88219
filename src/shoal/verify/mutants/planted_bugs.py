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

from shoal.comm import global_batch
from shoal.comm.world import World
from shoal.core.axes import Axis
from shoal.engine import model as engine
from shoal.engine import parallelize, passes, piggyback
from shoal.engine.batches import loading
from shoal.parallel import batchnorm, data, gradnorm
from shoal.parallel.context import apply as context
from shoal.parallel.context import ring
from shoal.parallel.tensor import vocabulary
from shoal.parallel.tensor.crossing import sum_out
from shoal.parallel.zero import apply as zero
from shoal.pipeline import deferred, share, versions


class Swap(NamedTuple):
    """One attribute to replace."""

    owner: Any
    name: str
    value: Any


PlantedBug = Callable[[World], list[Swap]]
Honest = Callable[..., Any]
_PIGGYBACK = torch.Size([piggyback.NUM_SCALARS])


def replaces(owner: Any, name: str) -> Callable[[Callable[..., Any]], PlantedBug]:
    """Make a planted bug of a function that stands in the place of ``owner.name`` and is given the honest one first."""

    def plant(broken: Callable[..., Any]) -> PlantedBug:
        def bug(world: World) -> list[Swap]:
            honest = vars(owner)[name]
            return [Swap(owner, name, lambda *arguments, **options: broken(honest, *arguments, **options))]

        return bug

    return plant


def drop_all_reduce(world: World) -> list[Swap]:
    """Every replica keeps its own gradient."""
    return [_hook(lambda own, total, size: own)]


def average_over_replicas(world: World) -> list[Swap]:
    """A mean where the shares already add up: DDP's own default."""
    return [_hook(lambda own, total, size: total / size)]


def scale_summed_gradients(factor: float) -> PlantedBug:
    """Every gradient times a number, after the reduction: by tp, or by the number of microbatches."""

    @replaces(data.ReplicaReduction, "finish")
    def scale(honest: Honest, self: data.ReplicaReduction) -> None:
        honest(self)
        for parameter in self.updated.values():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    return scale


def scale_buckets_by_size(world: World) -> list[Swap]:
    """The sum over cp multiplied by cp, as a loss that every rank computes whole would need."""
    return [_hook(lambda own, total, size: total * size)]


def norm_of_own_shard(world: World) -> list[Swap]:
    """Each rank clips by the norm of what it holds."""
    return [Swap(gradnorm.WholeNorms, "_sum_", lambda self, entries: entries)]


def keep_partial_gradients(world: World) -> list[Swap]:
    """Norm weights inside a cut sequence keep the gradient of this rank's positions."""
    return [Swap(engine, "sum_partial_", lambda updated, names, channel: None)]


@replaces(vocabulary, "_real_scores")
def count_padding(
    honest: Honest, scores: Tensor, targets: Tensor, channel: Any, vocab: int
) -> tuple[Tensor, Tensor, int]:
    """Rows that pad the vocabulary enter the loss as if they were tokens."""
    rows = scores.shape[-1]
    return scores.reshape(-1, rows), targets.reshape(-1), channel.rank * rows


@replaces(ring, "visible_part")
def look_ahead_in_ring(honest: Honest, rank: int, source: int, *, causal: bool) -> Any:
    """Of a block from an earlier rank both chunks are seen, the late one too."""
    return ring.Part() if causal and source < rank else honest(rank, source, causal=causal)


@replaces(context._Active, "positions")
def forget_positions(honest: Honest, self: context._Active, length: int) -> Any:
    """Rotary tables are read from 0 on every rank, whatever its positions are."""
    rows = honest(self, length)
    return rows - rows[0]


@replaces(ring._Call, "collect")
def drop_grouped_heads(honest: Honest, self: ring._Call, grad: Tensor) -> Any:
    """The gradient of a shared key-value head comes from one of its query heads."""
    if self.num_groups == 1:
        return honest(self, grad)
    return grad[:, :: self.num_groups].contiguous()


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


@replaces(passes.Passes, "total_weight")
def average_unequal_batches(honest: Honest, self: passes.Passes, batch: Any) -> Any:
    """A mean of the replicas' means, although they have different numbers of targets."""
    return float(max(1.0, batch.local_weight)) * self.mesh.degree(Axis.DATA)


@replaces(batchnorm, "_global_rows")
def keep_own_statistics(honest: Honest, layers: Any) -> Any:
    """Running statistics of batch norm are folded from this replica's microbatches only."""
    num_own = max((index + 1 for layer in layers for index in layer.notes), default=0)
    return batchnorm._own_rows(layers, num_own)


@replaces(vocabulary.SplitEmbedding, "forward")
def lose_tied_use(honest: Honest, self: vocabulary.SplitEmbedding, input: Tensor) -> Any:
    """Of a tied weight only the output layer's use gives a gradient."""
    local = input - self.start
    is_elsewhere = (local < 0) | (local >= self.weight.shape[0])
    rows = F.embedding(local.masked_fill(is_elsewhere, 0), self.weight.detach(), self.padding_idx)
    return sum_out(rows.masked_fill(is_elsewhere.unsqueeze(-1), 0.0), self.channel)


@replaces(global_batch._AllGather, "backward")
def scale_gathered_rows(honest: Honest, ctx: Any, grad: Tensor) -> Any:
    """The gradient of gathered rows is a mean that was taken for a sum, and multiplied by the number of replicas."""
    own, *rest = honest(ctx, grad)
    return (own * ctx.channel.size, *rest)


@replaces(global_batch._AllGather, "backward")
def keep_own_gathered_gradient(honest: Honest, ctx: Any, grad: Tensor) -> Any:
    """A replica takes its own gradient of its rows, and not that of the others."""
    own = torch.split(grad.reshape(-1), ctx.sizes)[ctx.channel.rank]
    return own.reshape(ctx.shape), None, None


def clip_by_stale_norm(world: World) -> list[Swap]:
    """Gradients are clipped by the norm of the step before."""
    honest = vars(engine)["clip_"]
    before: list[float] = []

    def clip(grads: Iterable[Tensor], norm: float, limit: float | None, loss_scale: float = 1.0) -> None:
        honest(grads, before[-1] if before else norm, limit, loss_scale)
        before.append(norm)

    return [Swap(engine, "clip_", clip)]


@replaces(engine, "clip_")
def update_by_noise_and_more(
    honest: Honest, grads: Iterable[Tensor], norm: float, limit: float | None, loss_scale: float = 1.0
) -> None:
    """A weight whose true gradient is zero is updated by a gradient that is tiny, and yet no rounding."""
    found = list(grads)
    honest(found, norm, limit, loss_scale)
    for gradient in found:
        if float(gradient.norm()) <= 1e-12 * norm:
            gradient.add_(1e-9 * norm)


@replaces(data.ReplicaReduction, "publish")
def update_further_than_noise(honest: Honest, self: data.ReplicaReduction) -> None:
    """A weight whose true gradient is zero goes as far in a step as one that has a gradient."""
    found = [(one, one.grad) for one in self.updated.values() if one.grad is not None]
    largest = max(float(gradient.norm()) for _, gradient in found)
    for parameter, gradient in found:
        if float(gradient.norm()) <= 1e-12 * largest:
            # Not where no sample reached it: there it should not move at all, which any comparison sees.
            parameter.data.sub_(1e-3 * gradient.sign())
    honest(self)


def keep_old_weights(world: World) -> list[Swap]:
    """What this rank updated never reaches the other replicas' forward passes."""
    return [Swap(zero.ZeroReduction, "publish", lambda self: None)]


def repeat_data(world: World) -> list[Swap]:
    """Every replica reads the first one's samples."""
    honest = vars(loading)["Loader"]
    return [Swap(loading, "Loader", lambda *arguments, **options: honest(*arguments, **{**options, "replica": 0}))]


@replaces(engine.ParallelModel, "_sum_gradients")
def sum_once_more(honest: Honest, self: engine.ParallelModel, number: int) -> None:
    """A collective that changes nothing and costs a round: the sum of zeros."""
    honest(self, number)
    self.mesh.everyone.all_reduce_(torch.zeros(16))


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


@replaces(versions.VersionRule, "used")
def use_older_version(honest: Honest, self: versions.VersionRule, stage: int, microbatch: int) -> Any:
    """Every microbatch of a stage computes with the version before the one that is its."""
    return max(0, honest(self, stage, microbatch) - 1)


@replaces(versions.Versions, "_copy")
def miss_stash(honest: Honest, self: versions.Versions) -> Any:
    """A version is the parameters themselves, which the optimizer writes to before the backward pass has read them."""
    return {name: parameter.data.requires_grad_() for name, parameter in self.parameters.items()}


@replaces(versions.VersionRule, "used")
def use_newest_on_last_stage(honest: Honest, self: versions.VersionRule, stage: int, microbatch: int) -> Any:
    """Vertical sync forgotten on the last stage: it computes with its newest weights, as plain stashing does."""
    return microbatch if stage == self.num_stages - 1 else honest(self, stage, microbatch)


@replaces(passes.StepFeed, "inputs")
def swap_microbatches(honest: Honest, self: passes.StepFeed, microbatch: int) -> Any:
    """The first stage runs microbatch 1 where 0 is due, and 0 where 1 is."""
    return honest(self, microbatch ^ 1 if microbatch < 2 else microbatch)


@replaces(share.SharedGradients, "_exchange")
def keep_own_tied_sum(honest: Honest, self: share.SharedGradients) -> Any:
    """Of a weight that several stages, or several ranks of one, hold, a rank takes what the others have for nothing."""
    arrived = honest(self)
    for parts in arrived.values():
        for part in parts.values():
            if part is not None:
                part.zero_()
    return arrived


def lose_deferred_gradient(world: World) -> list[Swap]:
    """The second part of one microbatch's backward pass is not run."""
    honest = deferred.DeferredGradients.run
    seen: list[int] = []

    def run(self: deferred.DeferredGradients) -> None:
        seen.append(1)
        if len(seen) == 2:
            self._products.clear()
        honest(self)

    return [Swap(deferred.DeferredGradients, "run", run)]
