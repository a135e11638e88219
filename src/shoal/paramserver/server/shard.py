"""One shard of the model on a server: its weights, its optimizer, and the gradients that wait for their update.

A replica is a state machine: it stores pushes in any order and applies the updates of the log in their order.
Replicas that applied the same updates have the same bits, and so has one process that applies them to whole tensors: the
optimizer kernels and the sums do not depend on where a tensor is cut.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shoal.core.errors import RequestError, RunError
from shoal.core.placement import Placement, place_whole
from shoal.optim.build import build_optimizer, export_state, import_state, initialise_state, set_rate
from shoal.optim.config import OptimConfig
from shoal.optim.groups import Groups
from shoal.paramserver.pushcodec import PushCodec
from shoal.paramserver.records import PushId, Update
from shoal.paramserver.server.gradients import Gradients, Stored
from shoal.paramserver.server.kept import KeptResiduals
from shoal.paramserver.sharding import NORM_OPTIMIZERS, Model, Piece, Shard
from shoal.paramserver.sparse import Rows

VERSIONS_REMEMBERED = 8
"""Old weights that delay compensation keeps."""
Aggregation = Literal["sum", "adasum"]

_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
_WEIGHTS, _OPTIMIZER, _GRADIENT, _HISTORY = "weights", "optimizer", "gradient", "history"


class ShardState:
    """A replica of one shard. Not for two threads at once."""

    def __init__(
        self,
        shard: Shard,
        *,
        model: Model,
        optim: OptimConfig,
        groups: Groups,
        aggregation: Aggregation = "sum",
        compensation: float = 0.0,
        history: int = VERSIONS_REMEMBERED,
    ) -> None:
        """A replica at version 0 whose weights are zero until ``load_weights`` or ``restore``.

        Args:
            shard: which part of the model it is.
            model: the trained parameters of the whole model.
            optim: the ``[optim]`` section.
            groups: of the whole model (``decide_groups``): what is exempt from weight decay.
            aggregation: how the gradients of an update become one.
            compensation: lambda of delay compensation; 0 leaves it out.
            history: old versions of the weights that delay compensation remembers; a gradient that is older is moved from the
                oldest of these.

        Raises:
            RequestError: the optimizer or the aggregation needs whole tensors, and the shard has a part of one.
        """
        parts = [piece.name for piece in shard.pieces if piece.numel != model[piece.name].numel]
        if parts and (optim.name in NORM_OPTIMIZERS or aggregation == "adasum"):
            needy = optim.name if optim.name in NORM_OPTIMIZERS else aggregation
            raise RequestError(
                f"{needy} needs whole tensors, and shard {shard.number} has a part of {parts[0]!r}; cut the model at tensors only"
            )
        self.shard = shard
        self.version = 0
        self.codec: PushCodec | None = None
        """Of the gradients that workers push; None where they come as they are."""
        self.kept: KeptResiduals | None = None
        """What workers have not sent yet; None where checkpoints do not have it."""
        self.on_update: Callable[[Update, Mapping[str, Tensor]], None] | None = None
        """Called after every update with its record and the gradients that made it, by parameter name."""
        dtype = _DTYPES[next(iter(model.values())).dtype]
        self._model = model
        self._aggregation = aggregation
        self._compensation = compensation
        self._history: OrderedDict[int, Tensor] = OrderedDict()
        self._history_length = history if compensation else 0
        self._gradients = Gradients(shard, model=model, dtype=dtype)
        self._flat = torch.zeros(shard.numel, dtype=dtype)
        self._parameters = {piece.name: nn.Parameter(self._view(self._flat, piece)) for piece in shard.pieces}
        self._optimizer = build_optimizer(optim, nn.Module(), updated=self._parameters, groups=groups)
        initialise_state(self._optimizer)

    @property
    def weights(self) -> Tensor:
        """The flat weights at ``version``; the live buffer, not a copy."""
        return self._flat

    @property
    def model(self) -> Model:
        """The trained parameters of the whole model."""
        return self._model

    @property
    def num_waiting(self) -> int:
        """Gradients that wait for their update."""
        return len(self._gradients)

    @torch.no_grad()
    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the shard's part of whole tensors."""
        for piece in self.shard.pieces:
            source = tensors[piece.name].detach().reshape(-1)[piece.start : piece.stop]
            self._flat[piece.offset : piece.offset + piece.numel].copy_(source)

    @torch.no_grad()
    def move_weights(self, memory: Tensor) -> None:
        """Go on in other memory of the same size; what the weights were stays readable where it is."""
        memory.copy_(self._flat)
        self._flat = memory
        for piece in self.shard.pieces:
            # The optimizer knows a parameter by itself, not by its memory.
            self._parameters[piece.name].data = self._view(memory, piece)

    def store(self, identity: PushId, gradient: Tensor, version: int, rows: Mapping[str, Rows] | None = None) -> bool:
        """Keep a copy of a pushed gradient until its update; False when it is here already, or was.

        Args:
            identity: of the push.
            gradient: the flat gradient of the shard; without the parameters that are in ``rows``.
            version: of the weights that it was computed with.
            rows: gradients of which only some rows are given, by parameter name.

        Raises:
            WrongGradient: it does not fit.
            NotFinite: it has NaN or infinity in it.
            WorkerGone: its worker has left without committing it.
        """
        return self._gradients.store(identity, gradient, version, rows)

    def missing(self, record: Update) -> tuple[PushId, ...]:
        """Pushes of an update that this replica has not been given."""
        return tuple(entry.identity for entry in record.entries if entry.identity not in self._gradients)

    @torch.no_grad()
    def apply(self, record: Update, lr: float) -> None:
        """Make update number ``record.number`` with this learning rate.

        Raises:
            RunError: it is not the next one, or a gradient of it is missing; nothing has changed.
        """
        if record.number != self.version:
            raise RunError(
                f"shard {self.shard.number} has version {self.version} and cannot apply update {record.number} to it"
            )
        missing = self.missing(record)
        if missing:
            first = missing[0]
            raise RunError(
                f"shard {self.shard.number} has {len(record.entries) - len(missing)} of the {len(record.entries)} gradients "
                f"of update {record.number}; the first it lacks is number {first.number} of worker {first.worker}"
            )
        total = self._aggregate(record)
        shown = total.clone() if self.on_update is not None else total
        self._remember_weights()
        for piece in self.shard.pieces:
            self._parameters[piece.name].grad = self._view(total, piece)
        set_rate(self._optimizer, lr)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.version += 1
        self._gradients.retire([entry.identity for entry in record.entries])
        self._gradients.retire(record.dropped)
        if self.kept is not None:
            self.kept.apply(record)
        if self.on_update is not None:
            self.on_update(record, {piece.name: self._view(shown, piece) for piece in self.shard.pieces})

    def discard(self, worker: str, keep: Collection[int] = ()) -> int:
        """A worker has left: drop what it pushed and never committed; how many gradients that were.

        Args:
            worker: its instance.
            keep: the numbers that it did commit (``UpdateLog.committed``).
        """
        if self.kept is not None:
            self.kept.discard(worker, keep)
        return self._gradients.discard(worker, keep)

    def placements(self) -> dict[str, Placement]:
        """Where each parameter's part lies in the whole, for a checkpoint."""
        found = {}
        for piece in self.shard.pieces:
            shape = self._model[piece.name].shape
            width = math.prod(shape[1:])
            found[piece.name] = place_whole(shape).rows(piece.start // width, piece.stop // width)
        return found

    def parameters(self) -> dict[str, Tensor]:
        """The live parts of the parameters, by name, as rows."""
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    def optimizer_state(self) -> dict[str, Tensor]:
        """The live optimizer state as ``<parameter>/<key>``; rows as in ``parameters``, or a count."""
        return export_state(self._optimizer, self._names())

    def load_optimizer_state(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of ``optimizer_state``.

        Raises:
            RunError: it does not fit; nothing has changed.
        """
        import_state(self._optimizer, self._names(), tensors)

    def export(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """A copy of everything: tensors by name, and values for ``json``. What ``restore`` makes of it goes on as this one."""
        tensors = {_WEIGHTS: self._flat.clone()}
        tensors |= {f"{_OPTIMIZER}/{name}": value.clone() for name, value in self.optimizer_state().items()}
        tensors |= {f"{_HISTORY}/{version}": old.clone() for version, old in self._history.items()}
        # Copies, each made at once: pushes are stored while another thread does this, and are sent on to whoever gets it.
        stored, gone = dict(self._gradients.stored), dict(self._gradients.gone)
        tensors |= {_gradient_name(identity): one.gradient.clone() for identity, one in stored.items()}
        values = {
            "shard": self.shard.number,
            "version": self.version,
            "stored": [[*identity, one.version] for identity, one in stored.items()],
            "retired": [list(identity) for identity in self._gradients.retired],
            "gone": [[worker, sorted(numbers)] for worker, numbers in gone.items()],
            "history": list(self._history),
        }
        if self.kept is not None:
            kept, values["kept"] = self.kept.export()
            tensors |= kept
        return tensors, values

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Become the replica that ``export`` saw.

        Raises:
            RunError: it is of another shard, or a tensor is missing or has another shape; nothing has changed.
        """
        history = {int(version): tensors.get(f"{_HISTORY}/{version}") for version in values["history"]}
        listed = [(PushId(worker, number), version) for worker, number, version in values["stored"]]
        gradients = {identity: tensors.get(_gradient_name(identity)) for identity, _ in listed}
        flat = {_WEIGHTS: tensors.get(_WEIGHTS)} | {str(key): value for key, value in (gradients | history).items()}
        wrong = [
            name
            for name, one in flat.items()
            if one is None or one.shape != self._flat.shape or one.dtype != self._flat.dtype
        ]
        if wrong or values["shard"] != self.shard.number:
            raise RunError(
                f"the snapshot of shard {values['shard']} does not fit shard {self.shard.number} of {self.shard.numel} elements"
                + (f": {wrong[0]} is missing or has another shape" if wrong else "")
            )
        prefix = f"{_OPTIMIZER}/"
        self.load_optimizer_state(
            {name[len(prefix) :]: one for name, one in tensors.items() if name.startswith(prefix)}
        )
        self._flat.copy_(tensors[_WEIGHTS])
        self.version = values["version"]
        stored = {
            identity: Stored(gradient=tensors[_gradient_name(identity)].clone(), version=version)
            for identity, version in listed
        }
        gone = {worker: frozenset(numbers) for worker, numbers in values["gone"]}
        self._gradients.restore(stored, [PushId(*one) for one in values["retired"]], gone)
        if self.kept is not None and "kept" in values:
            self.kept.restore(tensors, values["kept"])
        self._history = OrderedDict((version, tensors[f"{_HISTORY}/{version}"].clone()) for version in history)

    def _names(self) -> dict[nn.Parameter, str]:
        return {parameter: name for name, parameter in self._parameters.items()}

    def _view(self, flat: Tensor, piece: Piece) -> Tensor:
        """A piece of a flat buffer as rows of its parameter: norms of whole tensors are taken by row."""
        shape = self._model[piece.name].shape
        span = flat[piece.offset : piece.offset + piece.numel]
        return span.view(-1, *shape[1:]) if shape else span.view(())

    def _aggregate(self, record: Update) -> Tensor:
        """The update's one gradient, in the buffer of its first push, which nobody needs any more."""
        gradients = [self._scaled(self._gradients[entry.identity], entry.factor) for entry in record.entries]
        total = gradients[0]
        if self._aggregation == "adasum":
            for piece in self.shard.pieces:
                span = slice(piece.offset, piece.offset + piece.numel)
                total[span] = adasum([gradient[span] for gradient in gradients])
            return total
        for gradient in gradients[1:]:
            total += gradient
        return total

    def _scaled(self, stored: Stored, factor: float) -> Tensor:
        gradient = stored.gradient
        if self._compensation and stored.version < self.version:
            read = self._history.get(stored.version)
            read = next(iter(self._history.values())) if read is None else read
            gradient.copy_(compensate_delay(gradient, self._flat, read, self._compensation))
        # A factor of 1 is left out: it changes no bit and costs a pass over memory.
        return gradient if factor == 1.0 else gradient.mul_(factor)

    def _remember_weights(self) -> None:
        if self._history_length:
            self._history[self.version] = self._flat.clone()
            while len(self._history) > self._history_length:
                self._history.popitem(last=False)


def _gradient_name(identity: PushId) -> str:
    return f"{_GRADIENT}/{identity.worker}/{identity.number}"


# How gradients, or weights, of several workers become one. Functions over flat tensors, with the formula beside each line.
#
# Every operation rounds once (a product, then a sum): a compound one may round otherwise for the last elements of a tensor,
# and then a shard would depend on where it is cut. Sums go from left to right, so the caller's order is the order of the bits.


def scaled_sum(gradients: Sequence[Tensor], factors: Sequence[float]) -> Tensor:
    """``f_0 g_0 + f_1 g_1 + ...`` from left to right, as a new tensor. A factor of 1 changes no bit."""
    first, *others = [
        gradient if factor == 1.0 else gradient * factor for gradient, factor in zip(gradients, factors, strict=True)
    ]
    total = first.clone() if first is gradients[0] else first
    for gradient in others:
        total += gradient
    return total


def accumulate(gradients: Sequence[Tensor]) -> Tensor:
    """The plain sum, from left to right."""
    return scaled_sum(gradients, [1.0] * len(gradients))


def average(gradients: Sequence[Tensor], samples: Sequence[float]) -> Tensor:
    """The mean over samples: ``sum(n_i g_i) / sum(n_i)`` of gradients that are means over their own n_i."""
    total = sum(samples)
    return scaled_sum(gradients, [count / total for count in samples])


def fednova(
    weights: Tensor,
    locals_: Sequence[Tensor],
    *,
    shares: Sequence[float],
    steps: Sequence[float],
    rates: Sequence[float],
    rate: float | None = None,
) -> Tensor:
    """New weights from workers that took different numbers of local steps at different step sizes.

    Plain averaging would let the worker with the most steps decide where training goes; here each counts by its share alone.
    Wang et al. 2020, "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization" (FedNova).

    Args:
        weights: what all of them began with.
        locals_: what each of them ended with.
        shares: p_i, what each counts; adds up to 1 (its part of the samples).
        steps: tau_i, local steps of each.
        rates: eta_i, step size of each.
        rate: eta of the joint step; the mean of the workers' rates by their shares when left out.
    """
    # d_i = (w - w_i) / (eta_i tau_i)
    directions = [(weights - local) / (own * count) for local, own, count in zip(locals_, rates, steps, strict=True)]
    # tau_eff = sum p_i tau_i
    effective = sum(share * count for share, count in zip(shares, steps, strict=True))
    eta = rate if rate is not None else sum(share * own for share, own in zip(shares, rates, strict=True))
    # w <- w - tau_eff sum p_i eta d_i
    return weights - scaled_sum(directions, [effective * share * eta for share in shares])


def adasum(gradients: Sequence[Tensor]) -> Tensor:
    """Gradients that agree are averaged, those that do not are added: a pairwise tree over any number of them.

    Maleki et al. 2021, "Scaling Distributed Training with Adaptive Summation". Level by level, neighbours are joined;
    an odd one at the end goes up a level as it is. An update must be given whole tensors: dot products of parts are others.
    """
    level = list(gradients)
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=False)
        level = [_adasum_pair(left, right) for left, right in pairs] + level[len(level) // 2 * 2 :]
    return level[0].clone() if len(gradients) == 1 else level[0]


def _adasum_pair(left: Tensor, right: Tensor) -> Tensor:
    # In float64: the dot product of two large gradients loses its small difference from the squares in float32.
    wide_left, wide_right = left.double(), right.double()
    dot = torch.dot(wide_left.flatten(), wide_right.flatten())
    squares = [torch.dot(wide.flatten(), wide.flatten()) for wide in (wide_left, wide_right)]
    # (1 - g1.g2 / 2|g1|^2) g1 + (1 - g1.g2 / 2|g2|^2) g2; beside a zero gradient the other stays as it is.
    shares = [1.0 - torch.where(square > 0, dot / (2.0 * square), torch.zeros_like(dot)) for square in squares]
    return (shares[0] * wide_left + shares[1] * wide_right).to(left.dtype)


def compensate_delay(gradient: Tensor, weights_now: Tensor, weights_read: Tensor, strength: float) -> Tensor:
    """A late gradient moved to where the weights are now: ``g + lambda g * g * (w_now - w_read)``.

    Zheng et al. 2017, "Asynchronous Stochastic Gradient Descent with Delay Compensation": the product of the gradient
    with itself stands for the diagonal of the Hessian.
    """
    curvature = gradient * gradient
    curvature *= weights_now - weights_read
    curvature *= strength
    return curvature.add_(gradient)
