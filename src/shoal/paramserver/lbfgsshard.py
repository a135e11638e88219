"""A shard whose updates are not made of pushes but by programs: its part of the vectors of L-BFGS, and of the gradient that is
being summed.

A version is an iteration. Within one the weights are wherever the line search tries; what a checkpoint takes of them is what the
last whole iteration left, and with it the pairs that the next one needs.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import RequestError, RunError
from shoal.optim.build import Groups
from shoal.optim.config import OptimConfig
from shoal.paramserver.cutting import Model, Shard
from shoal.paramserver.evaluation import GradientSum
from shoal.paramserver.lbfgs import pair_names, start_name
from shoal.paramserver.programs import GRADIENT, WEIGHTS, Program
from shoal.paramserver.rounds import Round
from shoal.paramserver.shard import ShardState
from shoal.paramserver.vectors import ShardVectors

_VECTOR, _SUM = "vector/", "sum/"


class LbfgsShard(ShardState):
    """A replica of one shard under ``update=lbfgs``. Not for two threads at once."""

    def __init__(self, shard: Shard, *, model: Model, groups: Groups, history: int) -> None:
        """A replica at version 0 whose weights are zero until ``load_weights`` or ``restore``.

        Args:
            shard: which part of the model it is.
            model: the trained parameters of the whole model.
            groups: of the whole model.
            history: pairs that are kept.
        """
        super().__init__(shard, model=model, optim=OptimConfig(name="sgd"), groups=groups)
        self._vectors = ShardVectors(self.weights)
        self._sum = GradientSum(self.weights)
        self._pairs = pair_names(history)
        for name in (GRADIENT, *self._pairs):
            # All there from the beginning: a checkpoint has the same ones of every shard at any moment.
            self._vectors.put(name, torch.zeros_like(self.weights))

    def move_weights(self, memory: Tensor) -> None:
        """Go on in other memory; programs find the weights there."""
        super().move_weights(memory)
        self._vectors.move_weights(self.weights)

    def run(
        self,
        number: int,
        program: Program,
        *,
        is_first: bool = False,
        begins: tuple[int, int] | None = None,
        collects: bool = False,
    ) -> tuple[float, ...]:
        """Run a coordinator's program; see ``messages.Run``. The one that was run last is answered again.

        Raises:
            RequestError: it is out of turn, reads what is not there, or collects a sum that is not whole.
        """
        if number == self._vectors.number:
            return self._vectors.answer
        if is_first and number > self._vectors.number:
            self._vectors.expect(number)
        self._vectors.check_turn(number)
        if collects:
            if not self._sum.is_done:
                raise RequestError(f"shard {self.shard.number} has not been given every portion of the batch")
            self._vectors.put(GRADIENT, self._sum.total)
        answer = self._vectors.run(number, program)
        if begins is not None:
            self._sum.begin(*begins)
        return answer

    @torch.no_grad()
    def add_part(self, evaluation: int, portion: int, gradient: Tensor) -> bool:
        """Take a portion's gradient, copied; False when nobody waits for it (any more).

        Raises:
            RequestError: it does not fit.
        """
        return self._sum.add(evaluation, portion, gradient.clone())

    def apply(self, record: Round, lr: float) -> None:
        """Count an iteration; what it did to the weights is done.

        Raises:
            RunError: it is not the next one.
        """
        if record.number != self.version:
            raise RunError(
                f"shard {self.shard.number} has version {self.version} and cannot count iteration {record.number}"
            )
        self.version += 1

    def parameters(self) -> dict[str, Tensor]:
        """The parts of the parameters as the last whole iteration left them, by name, as rows; live ones."""
        kept = start_name(self.version)
        flat = self._vectors[kept] if kept in self._vectors.names else self.weights
        return {piece.name: self._view(flat, piece) for piece in self.shard.pieces}

    def optimizer_state(self) -> dict[str, Tensor]:
        """The live pairs as ``<parameter>/<vector>``, in rows as in ``parameters``."""
        return {
            f"{piece.name}/{name}": self._view(self._vectors[name], piece)
            for piece in self.shard.pieces
            for name in self._pairs
        }

    def export(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """A copy of everything; what ``restore`` makes of it goes on as this one."""
        number, answer, vectors = self._vectors.snapshot()
        tensors = {f"{_VECTOR}{name}": vector for name, vector in vectors.items()}
        coming, counts = self._sum.export()
        tensors |= {f"{_SUM}{name}": tensor for name, tensor in coming.items()}
        values = {"shard": self.shard.number, "version": self.version, "number": number, "answer": list(answer)}
        return tensors, values | {"sum": counts}

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Become the replica that ``export`` saw.

        Raises:
            RunError: it is of another shard.
        """
        weights = tensors.get(f"{_VECTOR}{WEIGHTS}")
        if weights is None or weights.shape != self.weights.shape or values["shard"] != self.shard.number:
            raise RunError(f"the snapshot of shard {values['shard']} does not fit shard {self.shard.number}")
        vectors = {name.removeprefix(_VECTOR): one for name, one in tensors.items() if name.startswith(_VECTOR)}
        self._vectors.restore(values["number"], values["answer"], vectors)
        coming = {name.removeprefix(_SUM): one for name, one in tensors.items() if name.startswith(_SUM)}
        self._sum.restore(coming, values["sum"])
        self.version = values["version"]
