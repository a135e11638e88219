"""The norm of the whole gradient, clipping by it, and the norms of whole tensors of which each rank holds a part.

torch's ``clip_grad_norm_`` sums each tensor in its own type, and how it splits that sum depends on how a tensor is sharded. A
clipped step scales every gradient by that norm, so its bits must not depend on the plan. Nor must those of LARS' and LAMB's trust
ratios, which are of whole tensors.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from shoal.comm.full_tensor import box
from shoal.comm.mesh import Mesh
from shoal.core.axes import Axis
from shoal.core.placement import Placement, Shape, place_whole
from shoal.optim.norms import product_sums, square_sums, whole_norms

_SLICE = 512


class WholeNorms:
    """Norms of whole tensors from the parts that ranks hold; every rank calls it with its own parts, all at the same time.

    Each rank enters the float64 sums of squares of its rows into one vector over all rows of the model, and the vectors are
    added. Where rows are only dealt out (ZeRO, a matrix cut along its outputs) every row is one rank's, the others enter zero,
    and the sum has the bits of one process. A row that is itself cut is the sum of its parts.
    """

    def __init__(
        self,
        shapes: Mapping[str, Shape],
        *,
        placements: Mapping[str, Placement],
        mesh: Mesh,
        split: Collection[str],
        is_sharded: bool,
        device: torch.device,
        entered: Collection[str] | None = None,
    ) -> None:
        """Everything that is known before the first step.

        Args:
            shapes: whole shapes of all trainable parameters, by name.
            placements: where the tensors that this rank updates lie in them.
            mesh: the ranks.
            split: names of the parameters that are cut along ``tp``; the others are equal on all its ranks.
            is_sharded: the tensors are dealt out along ``dp`` (ZeRO); otherwise every replica has all of them.
            device: where the tensors are; a rank may have none to tell.
            entered: names of the parameters that this rank speaks for along ``pp``, where others may hold them too; None for all.
        """
        self._device = device
        self._nothing = torch.zeros(0, dtype=torch.float64, device=device)
        self._names = sorted(shapes)
        rows = [shapes[name][0] if shapes[name] else 1 for name in self._names]
        *starts, self._num_rows = [0, *accumulate(rows)]
        self._slices = {name: (start, start + num) for name, start, num in zip(self._names, starts, rows, strict=True)}
        self._placements = placements
        self._tensor, self._data = mesh.channel(Axis.TENSOR), mesh.channel(Axis.DATA)
        self._split = frozenset(split)
        self._is_sharded = is_sharded
        self._pipeline = mesh.channel(Axis.PIPELINE)
        self._spoken_for = None if entered is None else frozenset(entered)

    def __call__(self, names: Sequence[str], tensors: Sequence[Tensor]) -> Tensor:
        """The float64 norms of the whole tensors whose parts these are."""
        sums = self._tensor_sums(names, tensors)
        return torch.stack([sums[name] for name in names]).sqrt_() if names else self._nothing

    def global_norm(self, names: Sequence[str], tensors: Sequence[Tensor], *, exact: bool) -> float:
        """The norm of all whole tensors together."""
        if not exact:
            return math.sqrt(float(self._fast_square(names, tensors)))
        sums = self._tensor_sums(names, tensors)
        # Root and square again, as for one process: the bits must be the same.
        norms = torch.stack([sums[name] for name in self._names]).sqrt_()
        return float(norms.square().sum().sqrt())

    def global_dot(self, names: Sequence[str], lefts: Sequence[Tensor], rights: Sequence[Tensor]) -> float:
        """The dot product of all whole tensors together with others that are cut alike."""
        sums = self._tensor_sums(names, lefts, rights)
        return float(torch.stack([sums[name] for name in self._names]).sum())

    def _tensor_sums(
        self, names: Sequence[str], tensors: Sequence[Tensor], others: Sequence[Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Sums of squares of whole tensors, or of products with others."""
        device = self._device
        by_row = torch.zeros(self._num_rows, dtype=torch.float64, device=device)
        factors = dict(zip(names, others, strict=True)) if others is not None else {}
        for name, tensor in self._entered(names, tensors):
            self._enter(by_row[slice(*self._slices[name])], tensor, self._placements[name], factors.get(name))
        self._sum_(by_row)
        return {name: by_row[slice(*bounds)].sum() for name, bounds in self._slices.items()}

    def _enter(self, by_row: Tensor, tensor: Tensor, placement: Placement, other: Tensor | None) -> None:
        if not placement.whole_shape:
            by_row += _row_sums(tensor, other)
            return
        has_whole_rows = all(patch.shape[1:] == placement.local_shape[1:] for patch in placement.patches)
        sums = _row_sums(tensor, other) if has_whole_rows else None
        for patch in placement.patches:
            first, num = patch.local_start[0], patch.shape[0]
            if sums is None:
                own = box(patch.local_start, patch.shape)
                part = _row_sums(tensor[own], None if other is None else other[own])
            else:
                part = sums[first : first + num]
            by_row[patch.whole_start[0] : patch.whole_start[0] + num] += part

    def _fast_square(self, names: Sequence[str], tensors: Sequence[Tensor]) -> Tensor:
        parts = [
            tensor[box(patch.local_start, patch.shape)]
            for name, tensor in self._entered(names, tensors)
            for patch in self._placements[name].patches
        ]
        device = self._device
        square = torch.zeros(1, dtype=torch.float64, device=device)
        if parts:
            square += _fast_norms(parts).square().sum()
        return self._sum_(square)

    def _entered(self, names: Sequence[str], tensors: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
        """What this rank enters: of a tensor that several ranks hold alike, only the first enters it."""
        is_first, own = self._tensor.rank == 0, self._spoken_for
        return [
            (name, part)
            for name, part in zip(names, tensors, strict=True)
            if (is_first or name in self._split) and (own is None or name in own)
        ]

    def _sum_(self, entries: Tensor) -> Tensor:
        self._tensor.all_reduce_(entries)
        self._pipeline.all_reduce_(entries)
        return self._data.all_reduce_(entries) if self._is_sharded else entries


def build_norms(
    model: nn.Module,
    *,
    mesh: Mesh,
    placements: Mapping[str, Placement],
    updated: Mapping[str, Placement],
    is_sharded: bool,
    shapes: Mapping[str, Shape] | None = None,
    entered: Collection[str] | None = None,
    device: torch.device | None = None,
) -> WholeNorms:
    """The norms of a model under a plan.

    Args:
        model: after its techniques were applied.
        mesh: the ranks.
        placements: of the parameters that tensor parallelism has cut.
        updated: of what this rank's optimizer updates, ``Reduction.placements``.
        is_sharded: True for ZeRO 1 to 3.
        shapes: of all trainable parameters, as tensor parallelism left them, where this rank's model has only some of them.
        entered: the parameters that this rank speaks for along ``pp``; None for all.
        device: where they are; that of the model's parameters when left out.
    """
    if shapes is None:
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    split = {name for name, placement in placements.items() if not placement.is_whole}
    wholes = {name: placements[name].whole_shape if name in placements else shape for name, shape in shapes.items()}
    where = {name: updated.get(name) or placements.get(name) or place_whole(shape) for name, shape in shapes.items()}
    device = next(model.parameters()).device if device is None else device
    return WholeNorms(
        wholes, placements=where, mesh=mesh, split=split, is_sharded=is_sharded, device=device, entered=entered
    )


def global_norm(named_grads: Iterable[tuple[str, Tensor]], *, exact: bool, norms: WholeNorms | None = None) -> float:
    """The 2-norm over all gradients together. Reading it is the step's one wait for the device.

    Args:
        named_grads: gradients with the names of their parameters.
        exact: sum squares in float64, by row and in the order of names, so that sharding changes no bit; clipping needs it.
            Otherwise squares are summed in their own type, several times cheaper: enough to see that all is finite and to show
            a number (a float32 tensor longer than about 1e19 counts as infinite).
        norms: under a plan that cuts tensors, how the parts make wholes; every rank then calls this together.
    """
    pairs = sorted(named_grads, key=lambda pair: pair[0])
    if norms is not None:
        return norms.global_norm([name for name, _ in pairs], [grad for _, grad in pairs], exact=exact)
    grads = [grad for _, grad in pairs]
    if not grads:
        return 0.0
    found = whole_norms(grads) if exact else _fast_norms(grads)
    return float(found.square().sum().sqrt())


def global_dot(named_pairs: Iterable[tuple[str, Tensor, Tensor]], *, norms: WholeNorms | None = None) -> float:
    """The dot product over all pairs of tensors together, in float64, by row and in the order of names: sharding changes no bit.

    Args:
        named_pairs: two tensors that are cut alike, with the name of their parameter.
        norms: see ``global_norm``.
    """
    triples = sorted(named_pairs, key=lambda triple: triple[0])
    names = [name for name, _, _ in triples]
    lefts, rights = [left for _, left, _ in triples], [right for _, _, right in triples]
    if norms is not None:
        return norms.global_dot(names, lefts, rights)
    sums = [product_sums(left, right).sum() for left, right in zip(lefts, rights, strict=True)]
    return float(torch.stack(sums).sum()) if sums else 0.0


def fast_square(tensor: Tensor) -> Tensor:
    """The float64 sum of squares of one tensor as the norm that is not ``exact`` has it, without waiting for the device."""
    return _fast_norms([tensor]).square_().sum()


def _row_sums(tensor: Tensor, other: Tensor | None) -> Tensor:
    return square_sums(tensor) if other is None else product_sums(tensor, other)


def _fast_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Float64 norms of short slices of the tensors.

    torch adds squares in the tensor's own type one after another: a float32 norm of 16 million elements is short by 7 parts in
    10,000, and that of a slice by less than one in a million, whatever it holds.
    """
    found, rests = [], []
    for tensor in tensors:
        flat = tensor.reshape(-1)
        end = flat.numel() - flat.numel() % _SLICE
        if end:
            found.append(torch.linalg.vector_norm(flat[:end].view(-1, _SLICE), dim=1))
        if end < flat.numel():
            rests.append(flat[end:])
    if rests:
        found.append(torch.stack(torch._foreach_norm(rests)))
    return torch.cat(found).double() if found else torch.zeros(1, dtype=torch.float64, device=tensors[0].device)


def clip_(grads: Iterable[Tensor], norm: float, limit: float | None, loss_scale: float = 1.0) -> None:
    """Shorten gradients in place to ``limit`` and take the loss scale out of them, in one pass; in none when nothing changes.

    Args:
        grads: every gradient of the model, still multiplied by ``loss_scale``.
        norm: the norm of the whole gradient without the loss scale, ``global_norm(...) / loss_scale``; finite.
        limit: the longest gradient allowed; None for no limit.
        loss_scale: what the loss was multiplied by.
    """
    shorten = limit / norm if limit is not None and norm > limit else 1.0
    factor = shorten / loss_scale
    tensors = list(grads)
    if factor != 1.0 and tensors:
        torch._foreach_mul_(tensors, factor)
