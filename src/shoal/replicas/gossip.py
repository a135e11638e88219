"""Gossip: a mean with the neighbours of a graph, in place of one with everybody.

After the optimizer's step an island replaces its weights by ``sum over j of W[i][j] x_j``, in the order of islands (Lian et al.
2017, arXiv 1705.09056; the update comes first and the mean second, which any optimizer allows). ``pushsum`` (Assran et al. 2019,
arXiv 1811.10792, algorithm 1) mixes a numerator and a number w by weights of which only columns sum to 1, and the model is their
quotient: so graphs may be directed and change with time. The optimizer steps the numerator, by the gradient at the quotient.

Islands never agree exactly, but on a complete graph; evaluations and checkpoints are of the mean.
"""

import torch
from torch import Tensor

from shoal.core.syncrule import SyncRule
from shoal.replicas.averaging import mean_weights
from shoal.replicas.graphs import Matrix, mixing
from shoal.replicas.policy import Island, PolicyState, StepEnd


class Gossip:
    """A round of mixing every H steps."""

    is_agreed = False
    """See ``Policy``."""
    left_out: tuple[int, ...] = ()
    """See ``Policy``: a neighbour's weights are taken as they are."""

    def __init__(self, island: Island, rule: SyncRule) -> None:
        assert rule.graph is not None
        self._island, self._graph = island, rule.graph
        self._is_directed = rule.kind == "pushsum"
        self._weight = torch.ones((), dtype=torch.float64)
        """The w of push-sum; 1 for gossip."""
        self._rounds = torch.zeros((), dtype=torch.int64)
        """Rounds so far: the place in a graph that changes with time."""

    @torch.no_grad()
    def before_update(self) -> None:
        """See ``Policy``. From the quotient back to the numerator."""
        self._scale(float(self._weight))

    @torch.no_grad()
    def after_update(self, end: StepEnd) -> bool:
        """See ``Policy``."""
        if end.is_round:
            matrix = mixing(
                self._graph,
                self._island.count,
                int(self._rounds),
                seed=self._island.seed,
                is_directed=self._is_directed,
            )
            self._mix(matrix)
            self._rounds += 1
        is_scaled = float(self._weight) != 1.0
        self._scale(1.0 / float(self._weight))
        return end.is_round or is_scaled

    def _scale(self, factor: float) -> None:
        if factor != 1.0:
            for weight in self._island.weights.values():
                weight.mul_(factor)

    def _mix(self, matrix: Matrix) -> None:
        island, own = self._island, self._island.number
        names = list(island.weights)
        sizes = [island.weights[name].numel() for name in names]
        flat = torch.cat([island.weights[name].reshape(-1) for name in names]) if names else torch.zeros(0)
        number = self._weight.reshape(1)
        # The number travels with the weights in bytes of its own, so that it keeps its 64 bits.
        sent = [
            (flat, number) if matrix[other][own] and other != own else (flat[:0], number[:0])
            for other in range(island.count)
        ]
        received = [
            (torch.empty_like(flat), torch.empty_like(number))
            if matrix[own][other] and other != own
            else (flat[:0].clone(), number[:0].clone())
            for other in range(island.count)
        ]
        island.channel.all_to_all([one[0] for one in sent], [one[0] for one in received])
        if self._is_directed:
            island.channel.all_to_all([one[1] for one in sent], [one[1] for one in received])
        received[own] = (flat, number)
        mixed: Tensor | None = None
        total = 0.0
        for other in range(island.count):
            if share := matrix[own][other]:
                part = received[other][0] * share
                mixed = part if mixed is None else mixed.add_(part)
                total += share * float(received[other][1]) if self._is_directed else 0.0
        assert mixed is not None, "an island keeps a part of itself"
        for name, part in zip(names, torch.split(mixed, sizes), strict=True):
            island.weights[name].copy_(part.view_as(island.weights[name]))
        if self._is_directed:
            self._weight.fill_(total)

    def restart(self) -> None:
        """See ``Policy``."""
        self._weight.fill_(1.0)
        self._rounds.zero_()

    def loaded(self, *, after_round: bool) -> None:
        """See ``Policy``."""

    def consensus(self) -> dict[str, Tensor]:
        """See ``Policy``: the mean of the islands' weights."""
        return mean_weights(self._island, is_agreed=False)

    def state(self) -> PolicyState:
        """See ``Policy``."""
        return PolicyState(shared={}, own={}, own_numbers={"weight": self._weight, "rounds": self._rounds})

    def close(self) -> None:
        """See ``Policy``."""
