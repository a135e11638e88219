"""Batch norm that means the same under every number of replicas.

Under plain data parallelism each replica updates its own running statistics from its own microbatches, so that replicas drift
apart and the model that is saved is rank 0's. Here a forward pass only notes its batch statistics; at the end of a step ``fold``
gathers the notes and updates the running statistics in the order of the global microbatches::

    replica 0: microbatch 0, 1, ...   then replica 1: microbatch 0, 1, ...   then ...          (local)
    microbatch 0 of all replicas together, microbatch 1 of all replicas together, ...          (sync)

which is what one process does that runs the same microbatches one after the other, bit for bit.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from shoal.comm.channel import is_silent
from shoal.core.errors import RequestError

# How torch's CPU kernel rounds ``momentum * batch + (1 - momentum) * running``, by the input that it is given: so do we, for its
# bits. Momentum is rounded to the type of the statistics first, but for the last of these.
_ROUNDS_SECOND = 0
"""Contiguous (or channels last), in the statistics' type: both products of the mean, and of the variance the second only."""
_ROUNDS_BOTH = 1
"""Contiguous, in 16 bits: both products of both."""
_ROUNDS_NONE = 2
"""Anything else, such as what ``transpose`` gave: no product, and in float32 not the batch's variance either."""


class ReplicaBatchNorm(_BatchNorm):
    """A batch norm that notes its statistics and leaves the running ones to ``fold``.

    In training it normalises by the statistics of the microbatch, or of all replicas' microbatches together. A microbatch with
    one value per channel gives the bias and is not folded, as its variance does not exist: the last microbatch of an epoch may be
    that small. A layer that is called several times in one microbatch notes its last call. Evaluation is torch's own.
    """

    group: dist.ProcessGroup | None
    """The replicas; None when there is one."""
    is_synchronised: bool
    index: int
    """Microbatch of this step that runs now."""
    latest: Tensor | None
    """Note of the newest forward pass, float64: count, how it is rounded, means, unbiased variances, (2 + 2 C)."""
    notes: dict[int, Tensor]
    """Notes of this step by microbatch."""

    def prepare(self, group: dist.ProcessGroup | None, *, is_synchronised: bool) -> None:
        """Set what torch's constructor knows nothing of."""
        self.group = group
        self.is_synchronised = is_synchronised
        self.index = 0
        self.latest = None
        self.notes = {}

    def forward(self, input: Tensor) -> Tensor:
        """Normalise; in training, note the statistics."""
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        if self.group is not None and self.is_synchronised:
            return self._forward_together(input, self.group)
        return self._forward_alone(input)

    def _forward_alone(self, x: Tensor) -> Tensor:
        if x.numel() == 0:
            return _touch(x, self.weight, self.bias)
        # With momentum 1 torch's kernel writes the batch's own statistics, in the bits that it would have folded.
        mean = torch.zeros_like(self.running_mean) if self.running_mean is not None else None
        variance = torch.zeros_like(self.running_var) if self.running_var is not None else None
        use_cudnn = torch.backends.cudnn.enabled
        y = torch.batch_norm(x, self.weight, self.bias, mean, variance, True, 1.0, self.eps, use_cudnn)
        # A layer that is only asked for its shapes has no statistics.
        if mean is not None and variance is not None and not is_silent():
            self.latest = _note(x.detach(), mean, variance)
        return y

    def _forward_together(self, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        y, moments = sync_normalise(x, self.weight, self.bias, self.eps, group)
        if self.running_mean is not None and not is_silent():
            unbiased = moments[1 + self.num_features :] / (moments[0] - 1)
            # A new tensor: the backward pass still needs the moments as they are.
            found = torch.cat((moments[1 : 1 + self.num_features], unbiased)).to(self.running_mean.dtype)
            self.latest = torch.cat((moments[:1], moments.new_full((1,), _ROUNDS_SECOND), found.double()))
        return y

    def settle(self) -> None:
        """Put the newest note under its microbatch; a forward pass that ran twice for one microbatch leaves one note."""
        if self.latest is not None:
            self.notes[self.index] = self.latest
            self.latest = None


class _ReplicaBatchNorm1d(ReplicaBatchNorm, nn.BatchNorm1d):
    pass


class _ReplicaBatchNorm2d(ReplicaBatchNorm, nn.BatchNorm2d):
    pass


class _ReplicaBatchNorm3d(ReplicaBatchNorm, nn.BatchNorm3d):
    pass


_REPLACEMENTS: dict[type[nn.Module], type[ReplicaBatchNorm]] = {
    nn.BatchNorm1d: _ReplicaBatchNorm1d,
    nn.BatchNorm2d: _ReplicaBatchNorm2d,
    nn.BatchNorm3d: _ReplicaBatchNorm3d,
}


def apply_batchnorm(model: nn.Module, *, group: dist.ProcessGroup | None, mode: str) -> None:
    """Make every batch norm of a model a ``ReplicaBatchNorm``, in place: parameters, buffers, names and hooks stay.

    Args:
        model: the module to change.
        group: its replicas; None for one process.
        mode: ``local`` normalises each microbatch by its own statistics; ``sync`` by those of all replicas' microbatches with
            the same index, for which every replica must run every index, forward and backward, if need be on no samples.

    Raises:
        RequestError: there are several replicas and a layer keeps running statistics that this function cannot keep equal.
    """
    assert mode in ("local", "sync"), mode
    has_peers = group is not None and dist.get_world_size(group) > 1
    for name, module in model.named_modules():
        replacement = _REPLACEMENTS.get(type(module))
        if replacement is not None:
            # The class is changed, not the object, so that every other reference to the layer sees the same layer.
            module.__class__ = replacement
            assert isinstance(module, ReplicaBatchNorm)
            module.prepare(group if has_peers else None, is_synchronised=mode == "sync")
        elif has_peers and isinstance(module, (_BatchNorm, _InstanceNorm)) and module.track_running_stats:
            raise RequestError(
                f"layer {name!r} is a {type(module).__name__}, whose running statistics would differ between replicas; use "
                'nn.BatchNorm1d, 2d or 3d (with train.batch_norm = "sync" for synchronised ones), or track_running_stats=False'
            )


def is_applied(model: nn.Module) -> bool:
    """True when the model has a batch norm that ``begin_microbatch`` and ``fold`` must serve."""
    return any(isinstance(module, ReplicaBatchNorm) for module in model.modules())


def running_statistics(model: nn.Module) -> dict[str, Tensor]:
    """The running means and variances of the model's batch norms by the names of its ``state_dict``: live tensors."""
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if isinstance(module, ReplicaBatchNorm) and module.track_running_stats:
            for name in ("running_mean", "running_var"):
                statistic = getattr(module, name)
                if isinstance(statistic, Tensor):
                    found[f"{path}.{name}"] = statistic
    return found


def begin_microbatch(model: nn.Module, index: int) -> None:
    """Say which microbatch of this replica and step the next forward pass is of, whether for the first time or again."""
    for layer in _layers(model):
        layer.settle()
        layer.index = index


@torch.no_grad()
def fold(model: nn.Module, *, keep: bool = True, rows: range | None = None) -> None:
    """Bring the running statistics up to date with this step's notes, alike on every replica, and forget the notes.

    Args:
        model: what ``apply_batchnorm`` changed. All replicas call this together.
        keep: False forgets the notes only, for a step that was skipped.
        rows: the microbatches of this step, where notes of several steps have come together; all of them when left out.
    """
    layers = [layer for layer in _layers(model) if layer.track_running_stats]
    others: list[dict[int, Tensor]] = []
    for layer in layers:
        layer.settle()
        others.append({} if rows is None else {at: note for at, note in layer.notes.items() if at not in rows})
        if rows is not None:
            layer.notes = {at - rows.start: note for at, note in layer.notes.items() if at in rows}
    if keep:
        by_type: dict[torch.dtype, list[ReplicaBatchNorm]] = {}
        for layer in layers:
            by_type.setdefault(_mean_of(layer).dtype, []).append(layer)
        for alike in by_type.values():
            _fold_rows(alike, _global_rows(alike))
    for layer, kept in zip(layers, others, strict=True):
        layer.notes = kept


def _layers(model: nn.Module) -> Iterable[ReplicaBatchNorm]:
    return (module for module in model.modules() if isinstance(module, ReplicaBatchNorm))


def _global_rows(layers: Sequence[ReplicaBatchNorm]) -> Tensor:
    """One row per global microbatch, in order: counts of all layers, how they are rounded, their means, their variances."""
    num_own = max((index + 1 for layer in layers for index in layer.notes), default=0)
    own = _own_rows(layers, num_own)
    group = layers[0].group
    if group is None or layers[0].is_synchronised:
        return own
    # Replicas may have run different numbers of microbatches: rows of zeros, whose count is zero, make them equal.
    nums = gather_in_order(torch.tensor([num_own], device=own.device), group)
    padded = own.new_zeros(max(int(num) for num in nums), own.shape[1])
    padded[:num_own] = own
    return torch.cat(gather_in_order(padded, group))


def _own_rows(layers: Sequence[ReplicaBatchNorm], num_rows: int) -> Tensor:
    sizes = [layer.num_features for layer in layers]
    num_layers = len(layers)
    rows = _mean_of(layers[0]).new_zeros(num_rows, 2 * num_layers + 2 * sum(sizes), dtype=torch.float64)
    start = 2 * num_layers
    for place, (layer, size) in enumerate(zip(layers, sizes, strict=True)):
        for index, note in layer.notes.items():
            rows[index, place], rows[index, num_layers + place] = note[0], note[1]
            rows[index, start : start + size] = note[2 : 2 + size]
            rows[index, start + sum(sizes) : start + sum(sizes) + size] = note[2 + size :]
        start += size
    return rows


def _fold_rows(layers: Sequence[ReplicaBatchNorm], rows: Tensor) -> None:
    """``running <- momentum * batch + (1 - momentum) * running`` for each row in turn, all layers at once."""
    device, num_layers = rows.device, len(layers)
    sizes = torch.tensor([layer.num_features for layer in layers], device=device)
    owner = torch.repeat_interleave(torch.arange(num_layers, device=device), sizes)
    momentum = torch.tensor([layer.momentum or 0.0 for layer in layers], dtype=torch.float64, device=device)
    is_average = torch.tensor([layer.momentum is None for layer in layers], device=device)
    tracked = torch.stack([_count_of(layer) for layer in layers])
    means = torch.cat([_mean_of(layer) for layer in layers])
    variances = torch.cat([_variance_of(layer) for layer in layers])
    for row in rows:
        has_variance = row[:num_layers] > 1
        rounding = row[num_layers : 2 * num_layers][owner]
        batch_means, batch_variances = row[2 * num_layers :].reshape(2, -1)
        tracked = tracked + has_variance
        factor = torch.where(is_average, 1.0 / tracked.double(), momentum)[owner]
        moved_means, moved_variances = _move(factor, rounding, batch_means, means, batch_variances, variances)
        means = torch.where(has_variance[owner], moved_means, means)
        variances = torch.where(has_variance[owner], moved_variances, variances)
    start = 0
    for layer, count in zip(layers, tracked, strict=True):
        end = start + layer.num_features
        _mean_of(layer).copy_(means[start:end])
        _variance_of(layer).copy_(variances[start:end])
        _count_of(layer).copy_(count)
        start = end


def _move(
    factor: Tensor, rounding: Tensor, batch_means: Tensor, means: Tensor, batch_variances: Tensor, variances: Tensor
) -> tuple[Tensor, Tensor]:
    """Running statistics after one microbatch; factor, rounding and the batch's are float64."""
    dtype, short = means.dtype, factor.to(means.dtype)
    is_exact = rounding == _ROUNDS_NONE
    moved_means = torch.where(
        is_exact,
        (factor * batch_means + (1 - factor) * means.double()).to(dtype),
        short * batch_means.to(dtype) + (1 - short) * means,
    )
    kept = ((1 - short) * variances).double()
    product = short.double() * batch_variances
    product = torch.where(rounding == _ROUNDS_BOTH, product.to(dtype).double(), product)
    moved_variances = torch.where(
        is_exact, factor * batch_variances + (1 - factor) * variances.double(), product + kept
    )
    return moved_means, moved_variances.to(dtype)


def _note(x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """What ``fold`` needs of a microbatch; mean and variance are the kernel's, in the type of the running ones."""
    count, channels = x.numel() // x.shape[1], (1, -1, *[1] * (x.ndim - 2))
    formats = {4: (torch.channels_last,), 5: (torch.channels_last_3d,)}.get(x.ndim, ())
    found = variance.double()
    if x.is_contiguous() or any(x.is_contiguous(memory_format=one) for one in formats):
        rounding = _ROUNDS_SECOND if x.dtype == mean.dtype else _ROUNDS_BOTH
    else:
        rounding = _ROUNDS_NONE
        if x.dtype == torch.float32:
            spread = (x.double() - mean.double().reshape(channels)).square()
            found = spread.sum(dim=[dim for dim in range(x.ndim) if dim != 1]) / (count - 1)
    return torch.cat((found.new_full((1,), count), found.new_full((1,), rounding), mean.double(), found))


def _mean_of(layer: ReplicaBatchNorm) -> Tensor:
    assert layer.running_mean is not None
    return layer.running_mean


def _variance_of(layer: ReplicaBatchNorm) -> Tensor:
    assert layer.running_var is not None
    return layer.running_var


def _count_of(layer: ReplicaBatchNorm) -> Tensor:
    assert layer.num_batches_tracked is not None
    return layer.num_batches_tracked


def _touch(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """An empty batch through the layer's parameters, which so get gradients of zero."""
    for parameter in (weight, bias):
        if parameter is not None:
            x = x + parameter.reshape(1, -1, *[1] * (x.ndim - 2)).to(x.dtype)
    return x


# Batch statistics over several replicas: the arithmetic of synchronised batch norm. torch's ``SyncBatchNorm`` refuses CPU
# tensors. This one runs wherever the group does, takes replicas with unequal counts and with none, and adds in the order of
# ranks, so that its bits do not depend on how a collective happens to reduce.

# Shapes: C channels; a moments vector is (1 + 2 C): the count, then C means, then C sums of squared distances from the mean (M2).


def local_moments(x: Tensor) -> Tensor:
    """The float64 moments of one microbatch, (N, C, ...) -> (1 + 2 C); zeros when it has no sample."""
    num_channels = x.shape[1]
    count = x.numel() // max(1, num_channels)
    moments = x.new_zeros(1 + 2 * num_channels, dtype=torch.float64)
    if count > 0:
        variance, mean = torch.var_mean(x.to(accumulation_dtype(x.dtype)), dim=_reduced_dims(x), correction=0)
        moments[0] = count
        moments[1 : 1 + num_channels] = mean
        moments[1 + num_channels :] = variance.double() * count
    return moments


def combine_moments(parts: Sequence[Tensor]) -> Tensor:
    """The moments of all parts together, added in their order; no part needs a sample.

    Chan, Golub & LeVeque 1983, "Algorithms for Computing the Sample Variance", equation 2.1 for several parts at once.
    """
    num_channels = (parts[0].numel() - 1) // 2
    counts = [part[0] for part in parts]
    means = [part[1 : 1 + num_channels] for part in parts]
    total = add_in_order(counts)
    mean = add_in_order([count * mean for count, mean in zip(counts, means, strict=True)]) / total.clamp(min=1)
    spread = add_in_order(
        [
            part[1 + num_channels :] + count * (part_mean - mean).square()
            for part, count, part_mean in zip(parts, counts, means, strict=True)
        ]
    )
    return torch.cat((total.reshape(1), mean, spread))


def add_in_order(parts: Sequence[Tensor]) -> Tensor:
    """The sum from first to last: a reduction over a dim may pair them otherwise."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def gather_in_order(packet: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Every replica's packet in the order of ranks; waits no longer than the group's own timeout."""
    if is_silent():
        return [packet] * dist.get_world_size(group)
    parts = [torch.empty_like(packet) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, packet, group=group)
    return parts


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that statistics of a tensor of ``dtype`` are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _reduced_dims(x: Tensor) -> list[int]:
    return [dim for dim in range(x.ndim) if dim != 1]


def _over_channels(vector: Tensor, ndim: int) -> Tensor:
    return vector.reshape(1, -1, *[1] * (ndim - 2))


class _SyncNormalise(torch.autograd.Function):
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` with the statistics of all replicas' microbatches together.

    Ioffe & Szegedy 2015, "Batch Normalization" (arXiv:1502.03167), algorithm 1. Gives the output and the moments, (1 + 2 C).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        """Gather moments, combine them in rank order, normalise."""
        moments = combine_moments(gather_in_order(local_moments(x), group))
        dtype, num_channels = accumulation_dtype(x.dtype), x.shape[1]
        count = moments[0].clamp(min=1)
        mean = moments[1 : 1 + num_channels].to(dtype)
        inverse = torch.rsqrt(moments[1 + num_channels :] / count + eps).to(dtype)
        scale = inverse if weight is None else inverse * weight.to(dtype)
        y = (x.to(dtype) - _over_channels(mean, x.ndim)) * _over_channels(scale, x.ndim)
        if bias is not None:
            y = y + _over_channels(bias.to(dtype), x.ndim)
        ctx.save_for_backward(x, weight, mean, inverse, count)
        ctx.group = group
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.mark_non_differentiable(moments)
        return y.to(x.dtype), moments

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        """The chain rule of the paper's section 3, in which a replica's input also moves the other replicas' statistics."""
        x, weight, mean, inverse, count = ctx.saved_tensors
        dtype, ndim, dims = mean.dtype, x.ndim, _reduced_dims(x)
        grad = grad_y.to(dtype)
        normalised = (x.to(dtype) - _over_channels(mean, ndim)) * _over_channels(inverse, ndim)
        sum_grad = grad.sum(dims)
        sum_grad_normalised = (grad * normalised).sum(dims)
        grad_x = None
        # Parameters get this replica's own share, because data parallelism adds them afterwards; the input needs the sums of all.
        if ctx.needs_input_grad[0]:
            packet = torch.cat((sum_grad, sum_grad_normalised)).double()
            mean_grad, mean_grad_normalised = (
                (add_in_order(gather_in_order(packet, ctx.group)) / count).to(dtype).chunk(2)
            )
            scale = inverse if weight is None else inverse * weight.to(dtype)
            centred = grad - _over_channels(mean_grad, ndim) - normalised * _over_channels(mean_grad_normalised, ndim)
            grad_x = (centred * _over_channels(scale, ndim)).to(x.dtype)
        grad_weight = sum_grad_normalised.to(weight.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = sum_grad.to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None, None


# Not `torch.compiler.disable`, which imports the compiler here and now: two seconds that every rank would pay at its start.
@_disable_dynamo
def sync_normalise(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Normalise by the statistics of all replicas; outside compiled graphs, because it waits for other processes."""
    normalised, moments = _SyncNormalise.apply(x, weight, bias, eps, group)  # type: ignore[no-untyped-call]
    return normalised, moments
