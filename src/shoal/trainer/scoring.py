"""The loss of a model whose outputs may be cut: along the vocabulary (tensor parallel) or along the sequence (context parallel).

With the losses that Shoal knows nothing is ever put together: each rank scores its part. A loss of the user's own gets what it
would get in one process, at the price of gathering it.
"""

from typing import Any

import torch

from shoal.comm.channel import Channel
from shoal.comm.mesh import Mesh
from shoal.core.axes import Axis
from shoal.models.losses import IGNORED, Correct, Loss, by_targets, count_correct, cross_entropy, scores_of, with_scores
from shoal.parallel.apply import ModelLayout
from shoal.parallel.tensor.vocabulary import gather_logits, split_count_correct, split_cross_entropy


def is_known(loss: Loss) -> bool:
    """True for the cross entropy of this project, whose parts are known to add up."""
    return loss is cross_entropy or loss is by_targets


class Scoring:
    """How a microbatch's output becomes a loss on this rank."""

    def __init__(self, loss: Loss, *, laid: ModelLayout | None = None, mesh: Mesh | None = None) -> None:
        self._given = loss
        self._is_known = is_known(loss)
        self._context = laid.context if laid is not None else None
        self._split: Channel | None = None
        self._vocab = 0
        if laid is not None and laid.tensor is not None and laid.tensor.splits_logits:
            assert mesh is not None and laid.tensor.vocab is not None
            self._split, self._vocab = mesh.channel(Axis.TENSOR), laid.tensor.vocab
        self.factor = self._context.loss_factor if self._context is not None else 1.0
        """What this rank's loss is multiplied by, so that the ranks of one replica add up to the whole."""

    def own_part(self, targets: torch.Tensor, weight: float) -> tuple[torch.Tensor, float]:
        """The targets of this rank's positions, and the weight of those; all of them where the sequence is not cut."""
        # A microbatch that counts for nothing, such as one that only keeps a replica in step, does so on every rank.
        if self._context is None or not self._context.keeps_local or weight == 0:
            return targets, weight
        own = targets.index_select(1, self._context.positions(targets.shape[1]).to(targets.device))
        if own.is_floating_point():
            # A regression has no target that is left out, and every rank has equally many positions.
            return own, weight * own.shape[1] / targets.shape[1]
        return own, float((own != IGNORED).sum())

    def loss(self, output: Any, targets: torch.Tensor) -> torch.Tensor:
        """The mean over the targets that count."""
        if self._split is None:
            return self._given(output, targets)
        if self._is_known:
            return split_cross_entropy(scores_of(output), targets, channel=self._split, vocab=self._vocab)
        whole = gather_logits(scores_of(output), channel=self._split, vocab=self._vocab)
        return self._given(with_scores(output, whole), targets)

    def count_correct(self, output: Any, targets: torch.Tensor) -> Correct | None:
        """How many targets have the highest score; None where that makes no sense."""
        if self._split is None:
            return count_correct(output, targets)
        return split_count_correct(scores_of(output), targets, channel=self._split, vocab=self._vocab)
