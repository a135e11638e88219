"""Follows the outputs of linear layers through one forward pass, to see which layers can be split over ranks.

A ``Label`` on a tensor says: this dim holds the output features of a linear layer (or the heads that they were viewed as), so
that a rank could have a contiguous share of it. Every operation either keeps a label (elementwise, views, attention head by
head) or needs features that other ranks would have, which blocks the group. What is not known blocks: a layer that is left whole
is slow, a layer that is wrongly split is wrong. torch.fx is not used: it cannot trace through the data-dependent Python of the
models that people have, while a real forward pass always runs.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shoal.parallel.analysis.groups import Groups, SizeUse
from shoal.parallel.analysis.traced_int import Features, Source, TracedInt, sources_of, trace_source


@dataclass(frozen=True)
class Label:
    """Where the features of a group are in a tensor."""

    group: int
    dims: tuple[int, ...]
    """The dim that a rank has a share of, then the dims inside it, outermost first."""
    units: int
    """How many pieces the share is counted in: heads once they are visible, else features."""
    origins: frozenset[str]
    """The producers whose features these are."""
    parts: int = 1
    """Equal parts that the producer's output was cut into to get here: 3 for a fused query-key-value layer."""
    written: tuple[SizeUse, ...] = ()
    """Sizes written on the way, for when their outermost dim turns out to count parts."""

    @property
    def dim(self) -> int:
        """The dim that a rank has a share of."""
        return self.dims[0]


class BlockedError(Exception):
    """Raised by a rule: the operation needs features of more than one rank. Its text says why."""


Rule = Callable[["Follower", tuple[Any, ...], dict[str, Any], Any], None]
RULES: dict[str, Rule] = {}
"""What each operation does to labels, by its name; ``rules.py`` and ``views.py`` fill it."""

ATTENTION = "scaled_dot_product_attention"
"""torch's attention function: the one that techniques can replace."""
_READS_VALUES = frozenset({"item", "tolist", "__bool__", "__float__", "__int__", "numpy", "numel", "nelement"})
_WRITES_VALUES = frozenset({"__setitem__", "register_hook"})
"""Hand no tensor back, but change one, or its gradient."""
_WRITES_SIZES = frozenset({"view", "reshape", "unflatten", "expand", "broadcast_to", "split", "split_with_sizes"})
"""Take whole numbers as sizes, which their rules put down; elsewhere a whole number is a value."""


DROPOUTS = ("dropout", "dropout_", "alpha_dropout")
"""Functions that drop single elements, of split features too."""


class Follower(TorchFunctionMode):
    """While active, keeps the labels of all tensors, and tells the groups what it sees."""

    def __init__(self, *, owners: dict[int, str]) -> None:
        super().__init__()
        self.groups = Groups()
        self.owners = owners
        """id of a parameter of a layer that may be split -> path of that layer."""
        self.used_outside: set[str] = set()
        """Layers whose parameters are used by something else than the layer itself."""
        self.kept_whole: set[Source] = set()
        """Sources of sizes of tensors without a label."""
        self.values: list[TracedInt] = []
        """Numbers that were used as values."""
        self.modules: list[str] = [""]
        """Paths of the modules that are running, innermost last."""
        self.plain_inputs: set[str] = set()
        """Linear layers that were called on a whole tensor."""
        self.lengths: list[tuple[str, int]] = []
        """Path of each module that attends with torch's function, and the positions that ask in it."""
        self.order: list[str] = []
        """Linear layers in the order of their first calls."""
        self.dropped: dict[str, list[int | None]] = {}
        """By the module that calls: the group of what each of its dropouts dropped, None for a whole tensor."""
        self._labels: dict[int, tuple[Tensor, Label]] = {}  # The tensor is kept so that its id is not given away.
        self._paused = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and see what it does to labels."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._paused:
            return result
        name = _name(func)
        tensors = list(tensors_in((args, kwargs)))
        if name in ("shape", "size") and tensors:
            return self._trace_size(tensors[0], args, kwargs, result)
        if name in _READS_VALUES | _WRITES_VALUES or isinstance(result, Tensor | tuple | list):
            self._look(name, tensors, args, kwargs, result)
        if name in DROPOUTS and isinstance(result, Tensor):
            label = self.label(result)
            self.dropped.setdefault(self.modules[-1], []).append(None if label is None else label.group)
        return result

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Inside, operations are not looked at: a layer that is known is seen as one piece."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def label(self, tensor: Tensor) -> Label | None:
        """The label of a tensor."""
        found = self._labels.get(id(tensor))
        return None if found is None else replace(found[1], group=self.groups.root(found[1].group))

    def put(self, tensor: Tensor, label: Label) -> None:
        """Label a tensor."""
        self._labels[id(tensor)] = (tensor, label)

    def join(self, labels: list[Label]) -> Label:
        """The label of features that were combined one by one."""
        first = labels[0]
        if any(label.parts != first.parts for label in labels):
            raise BlockedError("parts of one layer's output meet the whole of it, or of another's")
        return replace(
            max(labels, key=lambda label: len(label.dims)),
            group=self.groups.join([label.group for label in labels]),
            units=math.gcd(*(label.units for label in labels)),
            origins=frozenset().union(*(label.origins for label in labels)),
            parts=first.parts,
        )

    def consume(self, label: Label) -> None:
        """Note that features were used: in how many units, and in how many parts of their producers' outputs."""
        group = self.groups[label.group]
        group.units.add(label.units)
        for origin in label.origins:
            group.parts.setdefault(origin, set()).add(label.parts)

    def write_sizes(self, tensor: Tensor, label: Label, sizes: tuple[int, ...]) -> None:
        """Label a tensor, and note the sizes that the forward pass wrote down for it."""
        use = SizeUse(sizes, tuple(tensor.shape), label.dims)
        self.groups[label.group].sizes.append(use)
        self.put(tensor, replace(label, written=(*label.written, use)))

    def call_linear(self, path: str, x: Tensor, output: Tensor) -> None:
        """A linear layer ran: it sums up the features that it reads, and puts out features of its own."""
        if path not in self.order:
            self.order.append(path)
        label = self.label(x)
        if label is None:
            self.plain_inputs.add(path)
        elif label.dim != x.ndim - 1:
            self.groups[label.group].block(f"{path} reads its features in another dim than the last")
        else:
            self.consume(label)
            # A layer that sums up the features of several groups makes one of them: it is split for all or for none.
            number = self.groups.join([label.group, *self.groups.with_row(path)])
            group = self.groups[number]
            group.rows = list(dict.fromkeys([*group.rows, path]))
        features = output.shape[-1]
        self.put(output, Label(self.groups.of_producer(path), (output.ndim - 1,), features, frozenset([path])))

    def block(self, tensors: list[Tensor], reason: str) -> None:
        """The features of these tensors are needed whole."""
        for tensor in tensors:
            label = self.label(tensor)
            if label is not None:
                self.groups[label.group].block(reason)

    def _look(
        self, name: str, tensors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        for tensor in tensors:
            if id(tensor) in self.owners:
                self.used_outside.add(self.owners[id(tensor)])
        if name == ATTENTION:
            self.lengths.append((self.modules[-1], tensors[0].shape[-2]))
        if not any(id(tensor) in self._labels for tensor in tensors):
            self.kept_whole |= sources_of(_integers((args, kwargs)))
            # An operation in place may hand back a tensor whose label was that of its old contents: none here.
            return
        if name not in _WRITES_SIZES:
            self.values += [number for number in _integers((args, kwargs)) if isinstance(number, TracedInt)]
        rule = RULES.get(name)
        where = f" in {self.modules[-1]}" if self.modules[-1] else ""
        if rule is None:
            self.block(tensors, f"{name}{where} may mix its features")
            return
        try:
            rule(self, args, kwargs, result)
        except BlockedError as reason:
            self.block(tensors, f"{name}{where}: {reason}")

    def _trace_size(self, tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        label = self.label(tensor)
        if label is None:
            return result
        whole = trace_source(tensor.size(label.dim), Features(label.group), self.values)
        if isinstance(result, int):
            asked = kwargs["dim"] if "dim" in kwargs else args[1]
            return whole if asked % tensor.ndim == label.dim else result
        return torch.Size([whole if dim == label.dim else size for dim, size in enumerate(result)])


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dicts, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def _integers(value: Any) -> Iterator[int]:
    if isinstance(value, int):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _integers(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _integers(item)


def _name(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", "")
    if name == "__get__":  # A property, such as x.shape: named by the descriptor that it belongs to.
        return str(getattr(getattr(func, "__self__", None), "__name__", name))
    return name
