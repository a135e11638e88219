"""Gradients on their way into their shards: caught as autograd makes them, put beside each other, summed and scattered by unit.

DDP and ``fully_shard`` keep a second copy of every gradient in their buckets, and divide by the number of ranks. Here autograd's
own gradient is freed as soon as it is in its bucket, and replicas are summed, never divided, because each loss is already its
share of the global mean.

    whole   (stage 1, or several microbatches)   one buffer for all units; a rank's shard of the sum is its slice of that buffer
    shards  (stages 2 and 3, one microbatch)     one buffer for this rank's shards, and buckets for the units in flight

Every rank reduces units in the same fixed order, from the last to the first, whatever order autograd finishes them in: a unit
that is done early waits for its turn. Between hosts a reduction goes on while the backward pass does.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.carry import NOTHING, CarriedSum
from shoal.comm.channel import Handle
from shoal.comm.mesh import Mesh
from shoal.core.axes import Axis
from shoal.core.errors import RunError
from shoal.parallel.compressed import CompressedGradients
from shoal.parallel.zero.layout import Pool, Slot, Unit, ZeroLayout

MOST_UNDER_WAY = 2
"""Buckets that are being reduced between hosts while the next is filled; more would only hold more memory."""


class GradientStore:
    """The gradients of one rank. While ``is_active`` is False they are dropped as they come."""

    def __init__(
        self,
        layout: ZeroLayout,
        parameters: Mapping[str, nn.Parameter],
        *,
        mesh: Mesh,
        keeps_whole: bool,
        on_unit_in: Callable[[int], None],
        exchange: CompressedGradients | None = None,
    ) -> None:
        """``on_unit_in`` is called with a unit's index when a microbatch has brought all its gradients. An ``exchange`` sums all
        units together, at the end of a step that it compresses; gradients must then be kept whole."""
        assert keeps_whole or exchange is None
        example = next(iter(parameters.values()))
        self.layout = layout
        self.rank = mesh.coordinate(Axis.DATA)
        self.keeps_whole = keeps_whole
        size = layout.size if keeps_whole else layout.shard_size(self.rank)
        self.buffer = torch.empty(size, dtype=example.dtype, device=example.device)
        self._exchange = exchange
        self.is_active = True
        self.is_last = True
        self.apart: frozenset[str] = frozenset()
        """Parameters whose gradients somebody else catches, and puts here when they are whole."""
        self._example = self.buffer
        self._data, self._context = mesh.channel(Axis.DATA), mesh.channel(Axis.CONTEXT)
        self._on_unit_in = on_unit_in
        self._starts = layout.whole_starts() if keeps_whole else layout.shard_starts(self.rank)
        self._pool = Pool(layout.capacities())
        self._pool_buffers: list[Tensor] = []
        self._buckets: dict[int, tuple[Tensor, int | None]] = {}
        self._under_way: list[tuple[int, Handle]] = []
        self._order = list(reversed(range(len(layout.units))))
        self._turn = 0
        self._arrived: set[str] = set()
        self._missing: list[set[str]] = []
        self._expect_microbatch()
        self._slots = {slot.name: (index, slot) for index, unit in enumerate(layout.units) for slot in unit.slots}
        for index, unit in enumerate(layout.units):
            for slot in unit.slots:
                parameter: Any = parameters[slot.name]  # torch does not type the method
                parameter.register_post_accumulate_grad_hook(self._catcher(index, slot))

    @property
    def num_pool_bytes(self) -> int:
        """Bytes of the buckets made so far."""
        return sum(buffer.nbytes for buffer in self._pool_buffers)

    def begin_step(self) -> None:
        """Forget what the last step gathered."""
        self._settle(0)
        for index in list(self._buckets):
            self._drop_bucket(index)
        self._turn = 0
        self._arrived.clear()
        self._expect_microbatch()

    def begin_microbatch(self, *, is_last: bool) -> None:
        """Gradients that come from now on belong to another microbatch."""
        self.is_last = is_last
        self._expect_microbatch()

    def finish(self) -> None:
        """Reduce what is left; a parameter that got no gradient in the whole step gets zeros."""
        if self._is_compressed:
            self._reduce_compressed()
        while self._turn < len(self._order):
            index = self._order[self._turn]
            self._fill_missing(index)
            self._reduce(index)
        self._settle(0)

    def begin_rounds(self) -> list[CarriedSum]:
        """What the rounds of a step are summed in, a sum for each unit; see ``parallel/logical.py``."""
        return [CarriedSum(self._data) for _ in self.layout.units]

    def end_round(self, sums: Sequence[CarriedSum], *, is_empty: bool, is_last: bool) -> None:
        """Add a round's whole gradients to those of the rounds before; after the last, this rank's shards have the sum."""
        assert self.keeps_whole
        for index in self._order:
            bucket = self._bucket(index)
            if is_empty:
                bucket.fill_(NOTHING)
            else:
                self._fill_missing(index)
            self._context.all_reduce_(bucket)
            if is_last:
                sums[index].scatter(bucket, self.shard(index), self.layout.units[index].counts)
            else:
                sums[index].add_(bucket)
        self._turn = len(self._order) if is_last else 0
        self._arrived.clear()

    def put(self, name: str, gradient: Tensor) -> None:
        """Add the whole gradient of a parameter that is in ``apart``."""
        index, slot = self._slots[name]
        self._put(index, slot, gradient)

    @property
    def _is_compressed(self) -> bool:
        return self._exchange is not None and self._exchange.is_compressed

    def _reduce_compressed(self) -> None:
        assert self._exchange is not None
        for index in self._order:
            self._fill_missing(index)
        self._exchange.reduce_({name: self._place(index, slot) for name, (index, slot) in self._slots.items()})
        self._turn = len(self._order)

    def untouched(self) -> list[str]:
        """Parameters that got no gradient on this rank since the step began, in the order of names."""
        return sorted(self._slots.keys() - self._arrived)

    def shard(self, index: int) -> Tensor:
        """This rank's summed gradients of a unit, flat."""
        unit, start = self.layout.units[index], self._starts[index]
        if self.keeps_whole:
            start += unit.start(self.rank)
        return self.buffer[start : start + unit.counts[self.rank]]

    def _expect_microbatch(self) -> None:
        self._missing = [{slot.name for slot in unit.slots} for unit in self.layout.units]

    def _catcher(self, index: int, slot: Slot) -> Callable[[Tensor], None]:
        # Weakly: Python does not see through a parameter to its hooks, and under stage 3 the stores hold parameters. What was
        # laid out would stay for as long as the process, with gloo's groups and their threads.
        store = weakref.ref(self)

        def catch(parameter: Tensor) -> None:
            here = store()
            if here is not None:
                here._come(index, slot, parameter)

        return catch

    def _come(self, index: int, slot: Slot, parameter: Tensor) -> None:
        if parameter.grad is None:
            return  # Autograd came by without one: a split backward pass brings it later.
        if slot.name in self.apart:
            self._is_in(index, slot)
        elif self.is_active:
            self._catch(index, slot, parameter)
        else:
            parameter.grad = None
            self._is_in(index, slot)

    def _catch(self, index: int, slot: Slot, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if index in self._order[: self._turn]:
            raise RunError(
                f"parameter {slot.name!r} got a gradient after its unit {self.layout.units[index].path!r} had been summed over "
                "replicas; run one backward pass per microbatch, and recompute with use_reentrant=False"
            )
        self._put(index, slot, gradient)
        if self._is_in(index, slot) and self.is_last:
            self._reduce_in_turn()

    def _is_in(self, index: int, slot: Slot) -> bool:
        """Tick a gradient of this microbatch off; True when it is the last one of its unit."""
        self._missing[index].discard(slot.name)
        if self._missing[index]:
            return False
        self._on_unit_in(index)
        return True

    def _put(self, index: int, slot: Slot, gradient: Tensor) -> None:
        """First of a step: copied. Later ones: added, so that microbatches are summed in their order."""
        if slot.name in self._arrived:
            self._place(index, slot).add_(gradient)
            return
        self._arrived.add(slot.name)
        if not self.keeps_whole and slot.numel == self.layout.units[index].size and gradient.is_contiguous():
            # The unit is this one tensor, such as an embedding: its gradient is the bucket.
            self._buckets[index] = (gradient.detach().reshape(-1), None)
            return
        self._place(index, slot).copy_(gradient)

    def _place(self, index: int, slot: Slot) -> Tensor:
        return self._bucket(index)[slot.offset : slot.offset + slot.numel].view(slot.shape)

    def _bucket(self, index: int) -> Tensor:
        unit = self.layout.units[index]
        if self.keeps_whole:
            return self.buffer[self._starts[index] : self._starts[index] + unit.size]
        if index not in self._buckets:
            place, _ = self._pool.take(index)
            if place == len(self._pool_buffers):
                self._pool_buffers.append(self._example.new_zeros(self._pool.sizes[place]))
            self._buckets[index] = (self._pool_buffers[place][: unit.size], place)
        return self._buckets[index][0]

    def _drop_bucket(self, index: int) -> None:
        _, place = self._buckets.pop(index)
        if place is not None:
            self._pool.let_go(place)
            self._pool.forget()

    def _reduce_in_turn(self) -> None:
        if self._is_compressed:
            return
        while self._turn < len(self._order) and not self._missing[self._order[self._turn]]:
            self._reduce(self._order[self._turn])

    def _reduce(self, index: int) -> None:
        unit = self.layout.units[index]
        bucket = self._bucket(index)
        self._context.all_reduce_(bucket)
        handle = self._data.start_reduce_scatter(bucket, self.shard(index), unit.counts)
        self._turn += 1
        self._under_way.append((index, handle))
        # Whole gradients have their memory anyway, so any number of them may be on their way.
        self._settle((len(self._order) if self.keeps_whole else MOST_UNDER_WAY) if self._data.overlaps else 0)

    def _settle(self, most: int) -> None:
        """Wait until at most so many reductions are under way, and give their buckets back."""
        while len(self._under_way) > most:
            index, handle = self._under_way.pop(0)
            handle.wait()
            if index in self._buckets:
                self._drop_bucket(index)

    def _fill_missing(self, index: int) -> None:
        for slot in self.layout.units[index].slots:
            if slot.name not in self._arrived:
                self._place(index, slot).zero_()


def pieces_of(unit: Unit, flat: Tensor, rank: int) -> dict[str, Tensor]:
    """This rank's rows of each parameter of a unit, as views of its flat shard; parameters of which it has none are left out."""
    found: dict[str, Tensor] = {}
    for slot in unit.slots:
        first, end = slot.rows(rank)
        if first < end:
            start = unit.local_offset(slot, rank)
            rows = flat[start : start + (end - first) * slot.row]
            found[slot.name] = rows.view(end - first, *slot.shape[1:]) if slot.shape else rows.view(())
    return found
