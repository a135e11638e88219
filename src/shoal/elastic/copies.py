"""What only one rank holds, kept in memory that outlives it: two snapshots in turn, of the last two steps.

Under ZeRO a rank is the only one that has its rows of weights and optimizer state. After each update it writes them into memory
without a name, which the same rank of the next replica has mapped too: when the process dies the memory is the peer's. So on one
host a copy costs one copy of the shard per step, and no message.

    head:  step + 1 of the snapshot in each of two slots, 0 while it is being written
    body:  slot 0 | slot 1        the tensors in the order of names, each at a multiple of 64 bytes

The snapshot of step s goes to slot s mod 2, over that of step s - 2, when the sum of step s has been made: every rank took part
in that, so every rank had written s - 1 (``commit.may_write``). Whichever replica dies, and whenever: s - 1 or s is whole.
"""

import json
import mmap
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import RunError
from shoal.core.placement import Patch, Placement

NUM_SLOTS = 2
_HEAD_BYTES = 4096
_ALIGN = 64
_TYPES = {str(one): one for one in (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64,
)}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Form:
    """One tensor of a snapshot."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    placement: Placement
    start: int
    """Its first byte in a slot."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where everything lies in a slot."""

    forms: Mapping[str, Form]
    slot_bytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], placements: Mapping[str, Placement]) -> "Layout":
        """For these tensors, whose shapes stay."""
        forms, start = {}, 0
        for name, tensor in sorted(tensors.items()):
            shape = tuple(tensor.shape)
            forms[name] = Form(dtype=tensor.dtype, shape=shape, placement=placements[name], start=start)
            start += -(-tensor.nbytes // _ALIGN) * _ALIGN
        return cls(forms=forms, slot_bytes=max(start, _ALIGN))

    @property
    def num_bytes(self) -> int:
        """Of the whole memory."""
        return _HEAD_BYTES + NUM_SLOTS * self.slot_bytes

    def as_values(self) -> dict[str, object]:
        """As JSON."""
        forms = {
            name: [str(one.dtype), list(one.shape), one.start, _placement_values(one.placement)]
            for name, one in self.forms.items()
        }
        return {"forms": forms, "slot_bytes": self.slot_bytes}

    @classmethod
    def from_values(cls, values: Mapping[str, object]) -> "Layout":
        """Back from JSON.

        Raises:
            RunError: it is no layout.
        """
        try:
            found = values["forms"]
            assert isinstance(found, dict)
            forms = {
                str(name): Form(
                    dtype=_TYPES[dtype], shape=tuple(shape), start=int(start), placement=_placement(placement)
                )
                for name, (dtype, shape, start, placement) in found.items()
            }
            return cls(forms=forms, slot_bytes=int(str(values["slot_bytes"])))
        except (KeyError, TypeError, ValueError, AssertionError) as error:
            raise RunError(f"a rank's snapshots are described in a way that makes no sense: {error!r}") from error


class Snapshots:
    """One rank's memory, here or in the process that maps it."""

    def __init__(self, descriptor: int, layout: Layout) -> None:
        self.layout = layout
        self._mapping = mmap.mmap(descriptor, layout.num_bytes)
        self._words = memoryview(self._mapping)[: 8 * NUM_SLOTS].cast("Q")
        whole = self._whole = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self._views = [
            {
                name: _view(whole, _HEAD_BYTES + slot * layout.slot_bytes + form.start, form)
                for name, form in layout.forms.items()
            }
            for slot in range(NUM_SLOTS)
        ]

    @torch.no_grad()
    def write(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Write the snapshot after so many steps, over that of two steps before."""
        slot = step % NUM_SLOTS
        self._words[slot] = 0
        for name, view in self._views[slot].items():
            view.copy_(tensors[name])
        self._words[slot] = step + 1

    def flat(self, step: int) -> Tensor:
        """The bytes of a step's slot."""
        start = _HEAD_BYTES + step % NUM_SLOTS * self.layout.slot_bytes
        return self._whole[start : start + self.layout.slot_bytes]

    def open(self, step: int) -> Tensor:
        """The bytes of a step's slot, to be filled with what another rank has written; it is not whole before ``close``."""
        self._words[step % NUM_SLOTS] = 0
        return self.flat(step)

    def close(self, step: int) -> None:
        """All bytes of a step's slot are there."""
        self._words[step % NUM_SLOTS] = step + 1

    def steps(self) -> list[int]:
        """The steps of which the snapshot is whole."""
        return sorted(word - 1 for word in self._words if word > 0)

    def read(self, step: int) -> dict[str, Tensor]:
        """The tensors of a snapshot, in the memory itself; its writer is gone, or does not write."""
        assert step in self.steps()
        return dict(self._views[step % NUM_SLOTS])


@dataclass(frozen=True, kw_only=True)
class Offer:
    """How a peer finds a rank's snapshots."""

    pid: int
    descriptor: int
    token: str
    layout: Layout

    def to_json(self) -> str:
        """As one line of JSON."""
        head = {"pid": self.pid, "descriptor": self.descriptor, "token": self.token}
        return json.dumps({**head, "layout": self.layout.as_values()}, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> "Offer":
        """Back from JSON."""
        values = json.loads(text)
        layout = Layout.from_values(values["layout"])
        return cls(
            pid=int(values["pid"]), descriptor=int(values["descriptor"]), token=str(values["token"]), layout=layout
        )


def offer_snapshots(tensors: Mapping[str, Tensor], placements: Mapping[str, Placement]) -> tuple[Snapshots, Offer]:
    """New memory for the snapshots of these tensors. The offer's descriptor is to be closed when the peer has opened it."""
    layout, token = Layout.of(tensors, placements), secrets.token_hex(8)
    descriptor = os.memfd_create(_name(token))
    os.ftruncate(descriptor, layout.num_bytes)
    return Snapshots(descriptor, layout), Offer(pid=os.getpid(), descriptor=descriptor, token=token, layout=layout)


def keep_snapshots(layout: Layout) -> Snapshots:
    """Memory for the snapshots that a rank of another host sends."""
    descriptor = os.memfd_create(_name("kept"))
    try:
        os.ftruncate(descriptor, layout.num_bytes)
        return Snapshots(descriptor, layout)
    finally:
        os.close(descriptor)


def open_snapshots(offer: Offer) -> Snapshots:
    """The memory of another rank of this host.

    Raises:
        RunError: it is not there, or it is another one.
    """
    path = f"/proc/{offer.pid}/fd/{offer.descriptor}"
    try:
        if _name(offer.token) not in os.readlink(path):
            raise RunError(f"{path} does not hold the snapshots of process {offer.pid}")
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size != offer.layout.num_bytes:
                raise RunError(f"{path} has not the size that process {offer.pid} gave its snapshots")
            return Snapshots(descriptor, offer.layout)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise RunError(f"cannot open the snapshots of process {offer.pid}: {error}") from error


def _name(token: str) -> str:
    return f"shoal-copies-{token}"


def _view(whole: Tensor, start: int, form: Form) -> Tensor:
    size = form.dtype.itemsize
    for extent in form.shape:
        size *= extent
    return whole[start : start + size].view(form.dtype).view(form.shape)


def _placement_values(placement: Placement) -> list[object]:
    patches = [[list(one.local_start), list(one.whole_start), list(one.shape)] for one in placement.patches]
    return [list(placement.whole_shape), list(placement.local_shape), patches]


def _placement(values: Any) -> Placement:
    whole_shape, local_shape, patches = values
    return Placement(
        whole_shape=tuple(whole_shape),
        local_shape=tuple(local_shape),
        patches=tuple(
            Patch(local_start=tuple(local), whole_start=tuple(whole), shape=tuple(shape))
            for local, whole, shape in patches
        ),
    )
