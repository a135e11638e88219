"""A vocabulary split over the tensor-parallel ranks: the embedding, the output layer, and the loss from split scores.

Each rank holds an equal slice of rows, so a vocabulary that tp does not divide ends in rows that stand for nothing. They are
zero, no ``Patch`` covers them, their scores never enter a sum, and so their gradient is zero too::

    vocab 67, tp 4:   rows 0-16 | 17-33 | 34-50 | 51-66 and one of padding

Scores are never gathered for training. ``torch.distributed.tensor.parallel.loss_parallel`` computes such a loss too, but only on
DTensors of even slices, and it needs three collectives where one is enough: every rank gives its largest score, the sum of its
exponentials and its part of the target's score, and all of them merge these in the order of ranks.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shoal.comm.channel import Channel
from shoal.core.errors import RequestError
from shoal.core.placement import Patch, Placement, Shape
from shoal.models.losses import IGNORED, Correct
from shoal.parallel.tensor.crossing import gather_features, sum_out


def rows_per_rank(vocab: int, degree: int) -> int:
    """Rows of a vocabulary that each rank holds, padding included."""
    return -(-vocab // degree)


def place_rows(shape: Shape, *, degree: int, rank: int) -> Placement:
    """Where a rank's slice of rows lies; the rows that pad it are in no patch."""
    rows = rows_per_rank(shape[0], degree)
    real, rest = _num_real(shape[0], rows, rank), shape[1:]
    origin = (0,) * len(rest)
    patch = Patch(local_start=(0, *origin), whole_start=(rank * rows, *origin), shape=(real, *rest))
    return Placement(whole_shape=tuple(shape), local_shape=(rows, *rest), patches=(patch,) if real else ())


class SplitEmbedding(nn.Embedding):
    """An ``nn.Embedding`` with some of the rows: other ranks' tokens give zeros, and the sum over ranks is the whole."""

    channel: Channel
    start: int
    """The first row of this rank."""
    vocab: int
    """Rows of all ranks, without padding."""

    def forward(self, input: Tensor) -> Tensor:
        """Embed tokens that may be any rank's.

        Raises:
            IndexError: a token is none of the vocabulary; torch's own embedding raises the same.
        """
        _check_tokens((input < 0) | (input >= self.vocab), input, self.vocab, "token")
        local = input - self.start
        is_elsewhere = (local < 0) | (local >= self.weight.shape[0])
        rows = F.embedding(local.masked_fill(is_elsewhere, 0), self.weight, self.padding_idx)
        # Not in place: the sum below is, and needs the result of an operation that does not keep it.
        return sum_out(rows.masked_fill(is_elsewhere.unsqueeze(-1), 0.0), self.channel)


def apply_split_embedding(module: nn.Module, path: str, channel: Channel) -> None:
    """Make an embedding whose weight was cut by ``place_rows`` compute with it.

    Raises:
        RequestError: it is no plain ``nn.Embedding``, or has an option whose meaning depends on all rows of a batch.
    """
    if type(module) is not nn.Embedding:
        raise RequestError(
            f"{path!r} is a {type(module).__name__}; only an nn.Embedding can be split by its vocabulary"
        )
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, option):
            raise RequestError(
                f"embedding {path!r} has {option} set, which cannot be split over tp={channel.size} ranks; "
                f'leave {option} out, or keep the embedding whole: parallel.split = {{"{path}" = "none"}}'
            )
    rows = module.weight.shape[0]
    module.__class__ = SplitEmbedding
    start = channel.rank * rows
    padding = module.padding_idx
    is_here = padding is not None and start <= padding < start + rows
    # Past nn.Module.__setattr__: neither is a parameter, and a checkpoint has none of them.
    module.__dict__.update(channel=channel, start=start, vocab=module.num_embeddings)
    module.__dict__["num_embeddings"] = rows
    module.__dict__["padding_idx"] = padding - start if is_here and padding is not None else None


def split_cross_entropy(scores_local: Tensor, targets: Tensor, *, channel: Channel, vocab: int) -> Tensor:
    """The mean loss from each rank's slice of the scores: what ``models.losses.cross_entropy`` gives from all of them.

    One collective of three numbers per target; the backward pass has none.

    Args:
        scores_local: (..., rows per rank), the output of the split output layer.
        targets: (...), the same on every rank of the channel; ``IGNORED`` ones count for nothing.
        channel: the tensor-parallel ranks.
        vocab: the size of the whole vocabulary, without padding.

    Raises:
        RequestError: the scores are not in the last dim.
        IndexError: a target is no token of the vocabulary; torch's own loss raises the same.
    """
    scores, flat, start = _real_scores(scores_local, targets, channel, vocab)
    if scores.dtype in (torch.bfloat16, torch.float16):
        scores = scores.float()
    _check_tokens(((flat < 0) & (flat != IGNORED)) | (flat >= vocab), flat, vocab, "target")
    loss: Tensor = _SplitCrossEntropy.apply(scores, flat, channel, start)  # type: ignore[no-untyped-call]
    return loss


def split_count_correct(scores_local: Tensor, targets: Tensor, *, channel: Channel, vocab: int) -> Correct:
    """How many targets have the highest score of all ranks' slices; of equal scores the first counts."""
    scores, flat, start = _real_scores(scores_local, targets, channel, vocab)
    # float64 holds every score and every index exactly, so one collective carries both.
    own = torch.full((2, flat.numel()), -torch.inf, dtype=torch.float64, device=flat.device)
    if scores.shape[1]:
        best, where = scores.detach().max(dim=1)
        own[0], own[1] = best, where + start
    whole = _gather_stacked(own, channel)
    winner = whole[:, 0].argmax(dim=0, keepdim=True)
    chosen = whole[:, 1].gather(0, winner).squeeze(0)
    counted = flat != IGNORED
    return Correct(correct=int(((chosen == flat) & counted).sum()), counted=int(counted.sum()))


def gather_logits(scores_local: Tensor, channel: Channel, vocab: int) -> Tensor:
    """All scores on every rank, without padding, for a loss that is the user's own: (..., vocab).

    Differentiable: every rank must compute the same loss from it, and gets the gradient of its own slice.
    """
    return gather_features(scores_local, channel, -1)[..., :vocab]


def _real_scores(scores: Tensor, targets: Tensor, channel: Channel, vocab: int) -> tuple[Tensor, Tensor, int]:
    """Scores (N, real) without padding, targets (N,), and the token that the first score is of."""
    if scores.shape[:-1] != targets.shape:
        raise RequestError(
            f"the model's output is {tuple(scores.shape)} on each of tp={channel.size} ranks and the targets are "
            f"{tuple(targets.shape)}; return scores of the shape {(*targets.shape, 'choices')}, or keep the output layer whole"
        )
    rows = scores.shape[-1]
    assert rows == rows_per_rank(vocab, channel.size), (rows, vocab, channel.size)
    real = _num_real(vocab, rows, channel.rank)
    flat_scores = scores.reshape(-1, rows)
    return flat_scores if real == rows else flat_scores[:, :real], targets.reshape(-1), channel.rank * rows


def _check_tokens(is_wrong: Tensor, tokens: Tensor, vocab: int, what: str) -> None:
    # On CUDA looking would cost a synchronisation; a fake tensor, on which memory is predicted, has no values to look at.
    if tokens.device.type == "cpu" and not hasattr(tokens, "fake_mode") and bool(is_wrong.any()):
        raise IndexError(
            f"a {what} is outside the vocabulary of {vocab}: from {int(tokens.min())} to {int(tokens.max())}"
        )


def _num_real(vocab: int, rows: int, rank: int) -> int:
    return min(max(vocab - rank * rows, 0), rows)


def _gather_stacked(own: Tensor, channel: Channel) -> Tensor:
    whole = own.new_empty((channel.size, *own.shape))
    channel.all_gather(own.view(-1), whole.view(-1), [own.numel()] * channel.size)
    return whole


class _SplitCrossEntropy(torch.autograd.Function):
    """Mean of log(sum(exp(scores))) - score of the target, with N targets and each rank's V of the scores."""

    @staticmethod
    def forward(ctx: Any, scores_NV: Tensor, flat_N: Tensor, channel: Channel, start: int) -> Tensor:
        num_real = scores_NV.shape[1]
        own = scores_NV.new_zeros((3, flat_N.numel()))
        is_here_N = (flat_N >= start) & (flat_N < start + num_real)
        index_N1 = (flat_N - start).masked_fill(~is_here_N, 0).unsqueeze(1)
        exps_NV = scores_NV
        if num_real:
            own[0] = scores_NV.amax(dim=1)
            # A slice of nothing but -inf has no largest score to subtract; its exponentials are zero either way.
            exps_NV = (scores_NV - own[0].masked_fill(own[0] == -torch.inf, 0.0).unsqueeze(1)).exp_()
            own[1] = exps_NV.sum(dim=1)
            own[2] = scores_NV.gather(1, index_N1).squeeze(1).masked_fill_(~is_here_N, 0.0)
        else:
            own[0] = -torch.inf
        whole = _gather_stacked(own, channel)
        largest_N = whole[:, 0].amax(dim=0)
        factors = (whole[:, 0] - largest_N).exp_()
        sums_N = (whole[:, 1] * factors).sum(dim=0)
        losses_N = sums_N.log() + largest_N - whole[:, 2].sum(dim=0)
        is_counted_N = flat_N != IGNORED
        count = is_counted_N.sum().clamp(min=1)
        ctx.save_for_backward(exps_NV, factors[channel.rank] / sums_N, index_N1, is_here_N, is_counted_N, count)
        return losses_N.masked_fill(~is_counted_N, 0.0).sum() / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        exps_NV, factor_N, index_N1, is_here_N, is_counted_N, count = ctx.saved_tensors
        share_N = (grads[0] / count) * is_counted_N
        # softmax - 1 at the target
        grad_NV: Tensor = exps_NV * (factor_N * share_N).unsqueeze(1)
        if grad_NV.shape[1]:
            grad_NV.scatter_add_(1, index_N1, -(share_N * is_here_N).unsqueeze(1))
        return grad_NV, None, None, None
