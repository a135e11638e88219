"""``all_gather``: the rows of all replicas, for a loss that compares the samples of the global batch with one another.

A contrastive loss (CLIP, two towers) holds every sample against all others. Under data parallelism a replica has its own samples
only, and a loss of those alone is another loss. ``all_gather`` gives a replica the rows of all, in the order of the global batch:

    def loss(output, targets):
        image, text = (shoal.all_gather(rows) for rows in output)
        scores = scale * image @ text.T
        return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2        # own = torch.arange(len(image))

The gradient of gathered rows is summed over replicas and goes back to the replica whose rows they are. A step adds the replicas'
losses, each times its share of the batch, and their gradients with them; so the loss may be over all gathered rows on every
replica, as above, or over a replica's own rows against all: both are the loss of one process.

What a call means depends on what runs, which whoever runs a model says by ``gathering``: in a step, the replicas' channel or why
they cannot be joined; in evaluation, and where a model is only looked at, each process is alone.
"""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable

from shoal.comm.channel import Channel
from shoal.core.errors import Refusal, RequestError, RunError
from shoal.core.plan import Plan

AXIS = "batch"
"""What traffic of gathered rows is counted under: a loss asks for it, no plan does."""


@dataclass(frozen=True)
class Replicas:
    """Who is gathered from: the replicas of a channel, or nobody, or why that cannot be."""

    channel: Channel | None = None
    refusal: str | None = None


ALONE = Replicas()
_current: Replicas | None = None
"""Of this process, in which one thread computes; None where nothing of Shoal runs."""
_num_calls = 0


def replicas_of(plan: Plan, channel: Channel) -> Replicas:
    """Who a step of a resolved plan gathers from: the replicas along ``channel``, or the reason why it cannot."""
    reason = why_not_joined(plan)
    if reason is not None:
        return Replicas(refusal=reason)
    joined = Channel(AXIS, rank=channel.rank, size=channel.size, transport=channel.transport, traffic=channel.traffic)
    return Replicas(channel=joined)


def why_not_joined(plan: Plan) -> str | None:
    """Why a loss over the global batch cannot be computed under a resolved plan, and what to do; None where it can."""
    begin = f"plan {str(plan)!r}: shoal.all_gather makes a loss over the global batch, and "
    if plan.ps:
        return f"{begin}workers of parameter servers do not compute one step together; use dp in the place of ps"
    if plan.pp > 1:
        return f"{begin}a pipeline runs it in microbatches; use dp, with zero=3 or recompute where memory is short"
    if plan.cp > 1:
        return f"{begin}under cp a rank has a part of every sample; use dp or tp in the place of cp"
    if (plan.microbatches or 1) > 1:
        return (
            f"{begin}it is not the mean of the losses of {plan.microbatches} microbatches; leave microbatches and "
            "train.micro_batch out, so that a replica's samples are one, and raise dp, zero or recompute where memory is short"
        )
    return None


@contextmanager
def gathering(replicas: Replicas) -> Iterator[None]:
    """Inside, this is who ``all_gather`` gathers from."""
    global _current
    before, _current = _current, replicas
    try:
        yield
    finally:
        _current = before


def num_calls() -> int:
    """How often this process has called ``all_gather``: one who runs a model can see whether it does."""
    return _num_calls


def refuse_empty(replicas: Replicas, *, num_samples: int) -> Replicas:
    """The same replicas, or why they cannot be joined in a step of so many samples: one has none, and would be waited for."""
    if replicas.channel is None or num_samples >= replicas.channel.size:
        return replicas
    return Replicas(
        refusal=f"this step has {num_samples} samples for {replicas.channel.size} replicas, and shoal.all_gather needs one of "
        "each; choose a global batch whose last step of an epoch has more, or drop it (drop_last)"
    )


def refuse_absent(num_logical: int, num_present: int) -> Replicas:
    """Why replicas cannot be joined while some are absent: those present compute the shares one after the other."""
    return Replicas(
        refusal=f"{num_present} of {num_logical} replicas are present, and shoal.all_gather needs all of them at once; start the "
        "run again with --resume, with elastic.mode=restart"
    )


def all_gather(tensor: Tensor, dim: int = 0) -> Tensor:
    """The rows of all replicas, in the order of the global batch, with the gradient of a loss over the global batch.

    Call it in the model or in the loss of a training step, on every replica alike. Replicas may have different numbers of rows.
    In one process, and in evaluation, where every process scores batches of its own (``eval.batch``), the tensor is returned as
    it is. A loss over the global batch cannot be added up from microbatches, so a plan with several is refused, as are ``pp``,
    ``cp`` and parameter servers.

    Args:
        tensor: this replica's rows.
        dim: which dim counts them.

    Returns:
        The rows of the first replica, then those of the second, and so on. The gradient of a row is summed over all replicas and
        goes back to the one whose row it is.

    Raises:
        RequestError: the tensor has no such dim.
        RunError: this plan or this step cannot compute such a loss (``Refusal``, with the fix); replicas have rows of different
            shapes; or there are several processes and this is no step of Shoal.
    """
    global _num_calls
    _num_calls += 1
    given: object = tensor
    if not isinstance(given, Tensor):
        raise RequestError(
            f"shoal.all_gather got a {type(given).__name__}; give it a tensor, whose rows are this replica's"
        )
    if not -tensor.ndim <= dim < tensor.ndim:
        raise RequestError(
            f"shoal.all_gather got a tensor of shape {tuple(tensor.shape)} and dim={dim}; give it one of its dims"
        )
    if _current is None:
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise RunError(
                "shoal.all_gather was called outside of a training step of Shoal, where nobody says which ranks are replicas; "
                "call it in the model, in the loss or in the step function"
            )
        return tensor
    if _current.refusal is not None:
        raise Refusal(_current.refusal)
    if _current.channel is None or _current.channel.size == 1:
        return tensor
    return _gather(tensor, dim, _current.channel)


# Outside compiled graphs, because it waits for other processes.
@_disable_dynamo
def _gather(tensor: Tensor, dim: int, channel: Channel) -> Tensor:
    rows = tensor.movedim(dim, 0).contiguous()
    whole: Tensor = _AllGather.apply(rows, channel, _row_counts(rows, channel))  # type: ignore[no-untyped-call]
    return whole.movedim(0, dim)


def _row_counts(rows: Tensor, channel: Channel) -> list[int]:
    """Rows of every replica.

    Raises:
        RunError: replicas have rows of different shapes or types.
    """
    form = f"{tuple(rows.shape[1:])} {rows.dtype}"
    told = torch.tensor([len(rows), zlib.crc32(form.encode())], dtype=torch.int64, device=rows.device)
    found = torch.empty(2 * channel.size, dtype=torch.int64, device=rows.device)
    channel.all_gather(told, found, [2] * channel.size)
    counts, forms = found.reshape(-1, 2).T.tolist()
    others = [rank for rank, other in enumerate(forms) if other != forms[channel.rank]]
    if others:
        raise RunError(
            f"shoal.all_gather: rows are {form} on replica {channel.rank} and of another shape or type on replica {others[0]}; "
            "call it on every replica in the same order, and pad rows to one shape"
        )
    return [int(count) for count in counts]


class _AllGather(torch.autograd.Function):
    """Gathers rows along dim 0; backward, each replica gets the sum of all gradients of its own."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, channel: Channel, counts: list[int]) -> Tensor:
        """(n, ...) to (sum of n, ...)."""
        each = rows[:1].numel() if len(rows) else rows.new_empty(1, *rows.shape[1:]).numel()
        ctx.channel, ctx.sizes, ctx.shape = channel, [each * count for count in counts], rows.shape
        whole = rows.new_empty(sum(counts), *rows.shape[1:])
        channel.all_gather(rows.reshape(-1), whole.reshape(-1), ctx.sizes)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """(sum of n, ...) to (n, ...)."""
        own = grad.new_empty(ctx.shape)
        # A copy: the sum leaves its input undefined.
        ctx.channel.reduce_scatter(grad.reshape(-1).clone(), own.reshape(-1), ctx.sizes)
        return own, None, None
