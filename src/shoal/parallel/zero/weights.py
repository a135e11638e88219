"""Weights that are whole only while they are used: gathered before a module runs, gone after it, back for its backward pass.

    forward    pre-hook: gather the module's units into pool buffers, point `parameter.data` at them
               hook:     point it at NaN again, whose shape and type can still be read; a use at the wrong time shows as NaN
    backward   a hook on a block's outputs gathers it before its backward pass begins (a recomputed block needs its weights);
               it is let go when its gradients are in

Between hosts the unit that comes next is gathered while one computes (``_prefetch``), into a buffer more than without.

What autograd saves for the backward pass would keep a gathered weight alive, or read the next unit's weights in the same memory.
So saved tensors that lie in a pool buffer are packed as (unit, offset, shape, strides) and read from wherever the unit then is.
``fully_shard`` frees and allocates storages instead, which on the CPU costs a page fault per 4 KiB, every time.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from shoal.comm.channel import DONE, Handle, is_silent
from shoal.comm.mesh import Mesh
from shoal.core.axes import Axis
from shoal.core.errors import RunError
from shoal.parallel.zero.layout import Pool, ZeroLayout, backward_visits, next_visit
from shoal.parallel.zero.quantized import WeightCodec


@dataclass(frozen=True, slots=True)
class _Packed:
    """A saved tensor that lies in a gathered unit."""

    unit: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class _Kept:
    """Any other saved tensor, with the version that torch itself would have checked."""

    tensor: Tensor
    version: int


class WeightStore:
    """The weights of one rank at stage 3."""

    def __init__(
        self,
        layout: ZeroLayout,
        parameters: Mapping[str, nn.Parameter],
        *,
        mesh: Mesh,
        shard: Tensor,
        codec: WeightCodec | None = None,
    ) -> None:
        """``shard`` holds this rank's shards of all units; parameters are empty until they are gathered, by a codec or not."""
        self.layout = layout
        self._codec = codec
        self.calls: list[tuple[int, bool]] = []
        """Visits of the last microbatch's forward pass, and whether autograd saved weights in it."""
        self._channel = mesh.channel(Axis.DATA)
        rank, starts = mesh.coordinate(Axis.DATA), layout.shard_starts(mesh.coordinate(Axis.DATA))
        self._shards = [
            shard[start : start + unit.counts[rank]] for start, unit in zip(starts, layout.units, strict=True)
        ]
        self._members = [[parameters[slot.name] for slot in unit.slots] for unit in layout.units]
        nothing = shard.new_full((), float("nan"))
        self._absent = [[nothing.expand(slot.shape) for slot in unit.slots] for unit in layout.units]
        self._pool = Pool(layout.capacities())
        self._buffers: list[Tensor] = []
        self._by_pointer: dict[int, int] = {}
        self._views: dict[tuple[int, int], list[Tensor]] = {}
        self._place: dict[int, int] = {}
        self._holds = [0] * len(layout.units)
        self._held_for_backward: set[int] = set()
        self._is_over: set[int] = set()
        """Units whose gradients of this microbatch are in."""
        self._saving: list[saved_tensors_hooks] = []
        self._was_packed = False
        self.prefetches = self._channel.overlaps and codec is None
        """The next unit is gathered while one computes."""
        self._coming: dict[int, Handle] = {}
        """Units that have a buffer and are being gathered into it, before anybody holds them."""
        self._backward: list[tuple[int, ...]] = []
        """The units of the visits that the coming backward pass makes, in its order."""
        self._backward_at = 0
        for index in range(len(layout.units)):
            self._point(index, self._absent[index])

    @property
    def num_pool_bytes(self) -> int:
        """Bytes of the pool buffers made so far."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def attach(self, model: nn.Module) -> None:
        """Make the model's modules ask for their weights."""
        # Outside the blocks' hooks: the root's weights are held, and saved tensors packed, throughout the forward pass.
        model.register_forward_pre_hook(self._enter_model, prepend=True)
        model.register_forward_hook(self._leave_model, always_call=True)
        for number, visit in enumerate(self.layout.visits):
            module = model.get_submodule(visit.path)
            module.register_forward_pre_hook(_enter_hook(self, number), prepend=True)
            module.register_forward_hook(_leave_hook(self, number), always_call=True)

    def end_microbatch(self) -> None:
        """The backward pass is over, or was given up: nothing is held any more."""
        if self._saving:
            del self._saving[1:]
            self._end_saving()
        self._held_for_backward.clear()
        self._is_over.clear()
        self._backward = []
        for index, handle in self._coming.items():
            handle.wait()
            self._pool.let_go(self._place.pop(index))
        self._coming.clear()
        for index, count in enumerate(self._holds):
            if count:
                self._holds[index] = 1
                self._let_go(index)

    def forget(self) -> None:
        """The shards have changed, so the next use gathers them anew."""
        self._pool.forget()

    def unit_is_in(self, index: int) -> None:
        """A unit's gradients have come: its backward pass is over."""
        self._is_over.add(index)
        if index in self._held_for_backward and index != self.layout.root:
            self._held_for_backward.discard(index)
            self._let_go(index)

    # --- forward

    @_disable_dynamo
    def _enter_model(self, _module: nn.Module, _inputs: Any) -> None:
        if _is_in_backward():
            return
        self.calls.clear()
        if self.layout.root is not None:
            self._hold_for_backward(self.layout.root)
        self._prefetch(next_visit(self.layout, -1))
        self._begin_saving()

    @_disable_dynamo
    def _leave_model(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        if _is_in_backward():
            return
        self._end_saving()
        if not torch.is_grad_enabled():
            self.end_microbatch()
        elif self.prefetches:
            self._backward, self._backward_at = backward_visits(self.layout, self.calls), 0

    @_disable_dynamo
    def enter(self, number: int) -> None:
        """A module that reads the units of this visit begins."""
        units = self.layout.visits[number].units
        if is_silent():
            return  # It is only asked for shapes, and its weights are not read.
        if _is_in_backward():
            # A recompute that calls modules: what it saves is not packed, so the units stay until their gradients are in.
            for index in units:
                self._hold_for_backward(index)
            return
        for index in units:
            self._hold(index)
        self._prefetch(next_visit(self.layout, number))
        self._begin_saving()
        self._was_packed = False

    @_disable_dynamo
    def leave(self, number: int, output: Any) -> None:
        """A module that reads the units of this visit ends."""
        visit = self.layout.visits[number]
        if _is_in_backward() or is_silent():
            return
        self._end_saving()
        self.calls.append((number, self._was_packed))
        blocks = [index for index in visit.units if self.layout.units[index].is_block]
        if blocks and torch.is_grad_enabled():
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(_gather_hook(self, visit.units))  # type: ignore[no-untyped-call]
        for index in visit.units:
            self._let_go(index)

    def before_backward(self, units: tuple[int, ...]) -> None:
        """The gradient of a module's output is there: its backward pass is next."""
        # In a pipeline another microbatch may have ended since the forward pass, and let the root go.
        root = () if self.layout.root is None else (self.layout.root,)
        # A block may give back what it was given, as T5's do with the bias of positions. The gradient of that comes later.
        for index in (*root, *(index for index in units if index not in self._is_over)):
            self._hold_for_backward(index)

    # --- residence

    def _hold(self, index: int) -> None:
        if self._holds[index] == 0:
            handle = self._coming.pop(index) if index in self._coming else self._gather(index)
            handle.wait()
            self._point(index, self._views_in(index, self._place[index]))
        self._holds[index] += 1

    def _gather(self, index: int) -> Handle:
        """Give a unit a buffer, and begin to gather it unless it is there."""
        place, is_there = self._pool.take(index)
        if place == len(self._buffers):
            self._add_buffer(self._pool.sizes[place])
        self._place[index] = place
        if is_there:
            return DONE
        unit, shard = self.layout.units[index], self._shards[index]
        whole = self._buffers[place][: unit.size]
        if self._codec is None:
            return self._channel.start_all_gather(shard, whole, unit.counts)
        self._codec.gather(index, shard, whole, self._channel)
        return DONE

    def _prefetch(self, units: tuple[int, ...]) -> None:
        """Begin to gather what is needed next; not more than one visit ahead."""
        if self.prefetches and not self._coming:
            for index in units:
                if not self._holds[index] and index not in self._is_over:
                    self._coming[index] = self._gather(index)

    def _prefetch_backward(self, index: int) -> None:
        """A unit is held for its backward pass: begin to gather that of the visit before it."""
        for place in range(self._backward_at, len(self._backward) - 1):
            if index in self._backward[place]:
                self._backward_at = place
                self._prefetch(self._backward[place + 1])
                return

    def _let_go(self, index: int) -> None:
        self._holds[index] -= 1
        if self._holds[index] == 0:
            self._pool.let_go(self._place.pop(index))
            self._point(index, self._absent[index])

    def _hold_for_backward(self, index: int) -> None:
        if index in self._held_for_backward:
            return
        # A single layer is one node of the graph, which reads its weight as it is unpacked: with the next unit it is over. A tied
        # embedding would otherwise stay until the end of the backward pass, where its gradient comes in.
        for other in list(self._held_for_backward):
            if not self.layout.units[other].is_block and other != self.layout.root:
                self._held_for_backward.discard(other)
                self._let_go(other)
        self._held_for_backward.add(index)
        self._hold(index)
        self._prefetch_backward(index)

    def _add_buffer(self, size: int) -> None:
        buffer = torch.empty(size, dtype=self._shards[0].dtype, device=self._shards[0].device)
        self._by_pointer[buffer.untyped_storage().data_ptr()] = len(self._buffers)
        self._buffers.append(buffer)

    def _views_in(self, index: int, place: int) -> list[Tensor]:
        if (index, place) not in self._views:
            buffer, slots = self._buffers[place], self.layout.units[index].slots
            self._views[index, place] = [
                buffer[slot.offset : slot.offset + slot.numel].view(slot.shape) for slot in slots
            ]
        return self._views[index, place]

    def _point(self, index: int, tensors: list[Tensor]) -> None:
        for parameter, tensor in zip(self._members[index], tensors, strict=True):
            parameter.data = tensor

    # --- what autograd saves

    def _begin_saving(self) -> None:
        saving = saved_tensors_hooks(self._pack, self._unpack)
        # Only the outermost takes effect: hooks of a recompute inside must stay on top.
        if not self._saving:
            saving.__enter__()
        self._saving.append(saving)

    def _end_saving(self) -> None:
        saving = self._saving.pop()
        if not self._saving:
            saving.__exit__()

    def _pack(self, tensor: Tensor) -> _Packed | _Kept:
        if tensor.layout is torch.strided:
            place = self._by_pointer.get(tensor.untyped_storage().data_ptr())
            if place is not None:
                unit = self._pool.occupant(place)
                assert unit is not None
                self._was_packed = True
                return _Packed(unit, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
        return _Kept(tensor, tensor._version)

    def _unpack(self, packed: _Packed | _Kept) -> Tensor:
        if isinstance(packed, _Kept):
            if packed.tensor._version != packed.version:
                raise RunError(
                    f"a tensor of shape {tuple(packed.tensor.shape)} that the backward pass needs was changed in place: it is at "
                    f"version {packed.tensor._version}, not {packed.version}; take the in-place operation out of the model"
                )
            return packed.tensor
        self._hold_for_backward(packed.unit)
        buffer = self._buffers[self._place[packed.unit]]
        return buffer.view(packed.dtype).as_strided(packed.shape, packed.stride, packed.offset)


def _is_in_backward() -> bool:
    # Private, and what torch's own checkpoint asks too: there is no public way to know that a backward pass is running.
    return bool(torch._C._current_graph_task_id() != -1)


def _enter_hook(store: WeightStore, number: int) -> Any:
    return lambda _module, _inputs: store.enter(number)


def _leave_hook(store: WeightStore, number: int) -> Any:
    return lambda _module, _inputs, output: store.leave(number, output)


def _gather_hook(store: WeightStore, units: tuple[int, ...]) -> Any:
    return lambda _gradient: store.before_backward(units)
