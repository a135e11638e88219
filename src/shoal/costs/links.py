"""Which link of the chain is running, told by the calls of modules, and what each was seen to do.

A link begins where a module is called; what runs between two of them belongs to the first, because a pipeline stage ends where
the next one's first module is called.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shoal.costs.blocks import opened_modules
from shoal.costs.layers import OpKind, TensorSplit

INPUTS = "inputs"
"""Name of a link that no module begins: what a forward pass does before it calls the first block."""


class Seen(NamedTuple):
    """One operation with a batch of some size."""

    kind: OpKind
    sizes: tuple[int, ...]
    """What may depend on the batch: count, rows, inner and outer of a product; samples, heads, rows and outer of an attention;
    else bytes."""
    cut: TensorSplit
    width: float = 0.0
    """Features of an attention's head: the mean of a key's and a value's."""
    is_causal: bool = False
    experts: int = 1
    """Matrices that a product's rows are dealt out to."""


class Saved(NamedTuple):
    """One storage that is kept for the backward pass."""

    place: str
    """A field of ``SavedBytes``: whole, split or scores."""
    num_bytes: int


class Image(NamedTuple):
    """One operation on images (samples, channels, rows, columns), as far as their rows could be shared out."""

    rows: int
    """A number that divides the rows of what it reads and of what it puts out; 0 where it is no operation on images."""
    halo_bytes: int
    """What two neighbours that share the rows out read of each other's."""
    is_sure: bool
    """A convolution, or made of what one put out; any other tensor of four dims may be something else."""


@dataclass
class Done:
    """What a stretch of a forward pass did; each list in the order of execution, so that two batch sizes can be compared."""

    ops: list[Seen] = field(default_factory=list)
    saved: list[Saved] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)
    """Bytes of what is summed over tensor-parallel ranks."""
    carried: list[int] = field(default_factory=list)
    """Bytes of keys and values."""
    heads: list[tuple[int, int]] = field(default_factory=list)
    """Query heads and key-value heads of each attention."""
    images: list[Image] = field(default_factory=list)
    dealt: list[int] = field(default_factory=list)
    """Bytes of what is dealt out to experts, for each set of them."""

    def lengths(self) -> tuple[int, ...]:
        """How far each list has come."""
        return tuple(len(getattr(self, each.name)) for each in fields(self))

    def since(self, start: tuple[int, ...]) -> "Done":
        """What was done after ``lengths`` said this."""
        return Done(**{each.name: getattr(self, each.name)[at:] for each, at in zip(fields(self), start, strict=True)})

    def extend(self, more: "Done") -> None:
        """Do this as well."""
        for each in fields(self):
            getattr(self, each.name).extend(getattr(more, each.name))


@dataclass
class Link:
    """One link, as it was seen."""

    name: str
    is_block: bool
    done: Done = field(default_factory=Done)
    received: int = 0
    """Bytes of tensors with gradients that it was called with."""
    weights: dict[int, str] = field(default_factory=dict)
    """Parameters that it read: their numbers, with their names."""
    chooses: bool = False
    """It has used what was picked of many by their scores, as behind a router."""
    deals_anew: bool = True
    """Something was picked since rows were dealt out to experts: the next products with experts are of another set."""


class Links:
    """The links of one forward pass."""

    def __init__(self, module: nn.Module, *, units: Sequence[str] | None, blocks: Sequence[str]) -> None:
        self.all: list[Link] = [Link(INPUTS, False)]
        self.running: list[str] = [""]
        """Paths of the modules that run now, outermost first."""
        self._module = module
        self._blocks = frozenset(blocks)
        self._units = None if units is None else frozenset(units)
        self._opened = opened_modules(module, blocks)
        self._is_unit: list[bool] = []
        """Of the modules that run now; what a unit calls is its own affair."""

    @property
    def now(self) -> Link:
        """The link that is running."""
        return self.all[-1]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, calls of the module's parts are seen."""
        handles = []
        for path, part in self._module.named_modules():
            if path:
                enter = partial(self._enter, path)
                handles.append(part.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
                handles.append(part.register_forward_hook(self._leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, path: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        is_unit = not any(self._is_unit) and self._can_begin(path)
        if is_unit and self._begins(path):
            self._begin(path, args, kwargs)
        self._is_unit.append(is_unit)
        self.running.append(path)

    def _leave(self, *_: Any) -> None:
        self.running.pop()
        self._is_unit.pop()

    def _can_begin(self, path: str) -> bool:
        if self._units is not None:
            return path in self._units
        return path in self._blocks or (self.running[-1] in self._opened and path not in self._opened)

    def _begins(self, path: str) -> bool:
        """What lies around blocks is one link up to the next block; without blocks, each call that can be one is one."""
        if self._units is not None or path in self._blocks or not self._blocks:
            return True
        return self.now.is_block or self.now.name == INPUTS

    def _begin(self, path: str, args: Any, kwargs: Any) -> None:
        is_block = path in self._blocks
        num_calls = sum(link.name.partition("#")[0] == path for link in self.all)
        name = f"{path}#{num_calls + 1}" if num_calls else path
        first = self.all[0]
        is_idle = not first.done.saved and not first.weights and all(op.kind is OpKind.MEMORY for op in first.done.ops)
        if len(self.all) == 1 and first.name == INPUTS and (is_idle or not is_block):
            first.name, first.is_block = name, is_block
            return
        self.all.append(Link(name, is_block, received=num_received(args, kwargs)))


def num_received(*values: Any) -> int:
    """Bytes of tensors with gradients; what has none is made of the inputs and at hand everywhere."""
    tensors = {id(leaf): leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.requires_grad}
    return sum(tensor.nbytes for tensor in tensors.values())
