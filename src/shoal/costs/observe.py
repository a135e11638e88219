"""What each layer computes and keeps, read off the record of a forward pass: products by their sizes, the rest by its bytes.

A layer begins where a module is called; what runs between two of them belongs to the first, because a pipeline stage ends where
the next one's first module is called. Two things are followed through the pass, by the storages that tensors lie in: what tensor
parallelism would divide, from a layer that is cut by columns to the one that is cut by rows; and scores, from a product of two
activations to the next one.

Images are a third: which operations work on the rows of an image side by side, and what neighbours that share them out read of
each other. That is the attribute dim of a split (Jia et al. 2019, arXiv:1807.05358, Table 1: height and width of a convolution).
Columns could be shared out as well as rows; one of the two is enough to know what could be gained.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from shoal.costs.blocks import opened_modules
from shoal.costs.layers import OpKind, TensorSplit
from shoal.costs.operations import Attention, Product, is_view, named_arguments
from shoal.costs.tracer import Call, Event, ModuleCall, ModuleReturn, Record, TensorInfo, tensors_in

aten = torch.ops.aten
_CHOICES = frozenset(
    {aten.topk.default, aten.sort.default, aten.argmax.default, aten.max.dim, aten.multinomial.default}
)
"""How a router picks experts."""
_EMBEDDINGS = frozenset({aten.embedding, aten._embedding_bag})


INPUTS = "inputs"
"""Name of a layer that no module begins: what a forward pass does before it calls the first block."""


class OpUse(NamedTuple):
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


class SavedUse(NamedTuple):
    """One storage that is kept for the backward pass."""

    place: str
    """A field of ``SavedBytes``: whole, split or scores."""
    num_bytes: int


class Image(NamedTuple):
    """One operation on images (samples, channels, rows, columns), as far as their rows could be shared out."""

    rows: int
    """A number that divides the rows of its inputs and outputs; 0 where it is no operation on images."""
    halo_bytes: int
    """What two neighbours that share the rows out read of each other's."""
    is_sure: bool
    """A convolution, or made of the output of one; any other tensor of four dims may be something else."""


@dataclass
class Work:
    """What a part of a forward pass did; each list in the order of execution, so that two batch sizes can be compared."""

    ops: list[OpUse] = field(default_factory=list)
    saved: list[SavedUse] = field(default_factory=list)
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


@dataclass
class LayerUse:
    """One layer, as it was seen."""

    name: str
    is_block: bool
    work: Work = field(default_factory=Work)
    received: int = 0
    """Bytes of tensors with gradients that it was called with."""
    weights: dict[str, None] = field(default_factory=dict)
    """Names of the parameters that it read, in order."""
    chooses: bool = False
    """It has used what was picked of many by their scores, as behind a router."""
    deals_anew: bool = True
    """Something was picked since rows were dealt out to experts: the next products with experts are of another set."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """What is known of a storage."""

    weight: str | None = None
    """The name of the parameter that it is, or was made of alone."""
    is_split: bool = False
    """A tensor-parallel rank has only its part."""
    is_scores: bool = False
    """It lies between the two products of an attention that is not fused."""
    is_image: bool = False
    """A convolution made it, or something that works on rows of images side by side."""
    is_chosen: bool = False
    """The places that something has picked: of experts for a token, or of tokens for an expert."""


_PLAIN = Mark()


class Observer:
    """Reads the events of one forward pass into layers."""

    def __init__(
        self,
        module: nn.Module,
        record: Record,
        *,
        units: Sequence[str] | None,
        blocks: Sequence[str],
        splits: Mapping[str, TensorSplit],
        at_hand: Iterable[TensorInfo],
    ) -> None:
        """Set up.

        Args:
            module: for its structure.
            record: of its pass, for its parameters and buffers.
            units: the modules at whose calls layers begin; None for the blocks and what lies around them.
            blocks: the modules that are blocks.
            splits: what tensor parallelism would do to modules.
            at_hand: inputs and targets; what is there anyway is not counted as saved.
        """
        self.layers: list[LayerUse] = [LayerUse(INPUTS, False)]
        self.cut_of_weight = {name: split_of(name, splits) for name in record.parameters}
        self.experts_of_weight: dict[str, int] = {}
        """Matrices that a parameter is made of, where rows are dealt out to them."""
        self._sizes = {name: parameter.numel() for name, parameter in record.parameters.items()}
        tables = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
        self._tables = {name for name, parameter in module.named_parameters() if id(parameter) in tables}
        """Names of the weights of embeddings."""
        self._marks = {parameter.storage: Mark(weight=name) for name, parameter in record.parameters.items()}
        there = (*record.parameters.values(), *record.buffers.values(), *at_hand)
        self._counted = {tensor.storage for tensor in there}
        self._blocks = frozenset(blocks)
        self._units = None if units is None else frozenset(units)
        self._opened = opened_modules(module, blocks)
        self._running: list[str] = [""]
        self._is_unit: list[bool] = []
        """Of the modules that run now; what a unit calls is its own affair."""

    @property
    def now(self) -> LayerUse:
        """The layer that is running."""
        return self.layers[-1]

    def read(self, events: Iterable[Event]) -> None:
        """Take up all events of a pass."""
        for event in events:
            if isinstance(event, ModuleCall):
                is_unit = not any(self._is_unit) and self._can_begin(event.path)
                if is_unit and self._begins(event.path):
                    self._begin(event)
                self._is_unit.append(is_unit)
                self._running.append(event.path)
            elif isinstance(event, ModuleReturn):
                self._running.pop()
                self._is_unit.pop()
            elif isinstance(event, Call):
                self._write(event)
            else:
                self._save(event.tensor)

    def _can_begin(self, path: str) -> bool:
        if self._units is not None:
            return path in self._units
        return path in self._blocks or (self._running[-1] in self._opened and path not in self._opened)

    def _begins(self, path: str) -> bool:
        """What lies around blocks is one layer up to the next block; without blocks, each call that can be one is one."""
        if self._units is not None or path in self._blocks or not self._blocks:
            return True
        return self.now.is_block or self.now.name == INPUTS

    def _begin(self, call: ModuleCall) -> None:
        is_block = call.path in self._blocks
        num_calls = sum(layer.name.partition("#")[0] == call.path for layer in self.layers)
        name = f"{call.path}#{num_calls + 1}" if num_calls else call.path
        first = self.layers[0]
        is_idle = not first.work.saved and not first.weights and all(op.kind is OpKind.MEMORY for op in first.work.ops)
        if len(self.layers) == 1 and first.name == INPUTS and (is_idle or not is_block):
            first.name, first.is_block = name, is_block
            return
        self.layers.append(LayerUse(name, is_block, received=num_received(call.args, call.kwargs)))

    def _write(self, call: Call) -> None:
        func, inputs, outputs = call.func, tensors_in((call.args, call.kwargs)), tensors_in(call.output)
        marks = [self._mark_of(tensor) for tensor in inputs]
        for mark in marks:
            if mark.weight is not None:
                self.now.weights.setdefault(mark.weight)
        # Not where it picks: a softmax by hand takes the largest score, and nobody asks where that was.
        self.now.chooses |= any(mark.is_chosen for mark in marks)
        picks = func in _CHOICES
        self.now.deals_anew |= picks
        image = self._write_image(func, named_arguments(func, call.args, call.kwargs), inputs, marks, outputs)
        if call.products:
            made = self._write_products(call.products, inputs, marks, outputs)
        else:
            made = self._write_other(func, inputs, marks, outputs)
        for tensor in outputs:
            if tensor.storage not in self._marks:
                is_chosen = picks and not tensor.is_floating_point()
                mark = replace(made(tensor), is_image=image and tensor.ndim == 4, is_chosen=is_chosen)
                self._marks[tensor.storage] = mark

    def _write_image(
        self,
        func: Any,
        named: Mapping[str, Any],
        inputs: Sequence[TensorInfo],
        marks: Sequence[Mark],
        outputs: Sequence[TensorInfo],
    ) -> bool:
        """Write down what an operation does to images; whether it makes one."""
        if is_view(func):
            return False
        read = [tensor for tensor, mark in zip(inputs, marks, strict=True) if mark.weight is None]
        is_from_image = any(mark.is_image for mark in marks)
        image = _read_image(func, named, read, outputs, comes_from_image=is_from_image)
        if image is not None:
            self.now.work.images.append(image)
        return image is not None and image.is_sure and image.rows > 0

    def _write_products(
        self,
        products: Sequence[Product | Attention],
        inputs: Sequence[TensorInfo],
        marks: Sequence[Mark],
        outputs: Sequence[TensorInfo],
    ) -> Callable[[TensorInfo], Mark]:
        work = self.now.work
        weights = [
            mark.weight
            for tensor, mark in zip(inputs, marks, strict=True)
            if mark.weight is not None and tensor.ndim > 1
        ]
        is_split = any(mark.is_split for mark in marks)
        cut = self._cut_of_product(weights[0]) if weights else TensorSplit.ALL if is_split else TensorSplit.NOTHING
        for product in self._deal(products, inputs, marks):
            work.ops.append(_use_of(product, cut))
            if isinstance(product, Attention):
                work.heads.append((product.heads, product.kv_heads))
                work.carried.append(inputs[1].nbytes + inputs[2].nbytes)
        if cut is TensorSplit.ROWS:
            work.sums.append(outputs[0].nbytes)
        if isinstance(products[0], Attention) or weights:
            is_split = cut in (TensorSplit.COLUMNS, TensorSplit.ALL)
            return lambda _: Mark(is_split=is_split)
        had_scores = any(mark.is_scores for mark in marks)
        if len(inputs) > 1:
            # Keys, or values: the operand that is no query and no score. A bias comes first where there is one.
            work.carried.append(inputs[-1].nbytes)
        return lambda _: Mark(is_split=is_split, is_scores=not had_scores)

    def _deal(
        self, products: Sequence[Product | Attention], inputs: Sequence[TensorInfo], marks: Sequence[Mark]
    ) -> Iterator[Product | Attention]:
        """The products, with those of experts seen as what they are.

        Groups of rows with a matrix of their own each are experts where torch is told of groups. A plain batch of products with
        a parameter that is a batch of matrices may as well be heads: it is experts where this layer has chosen before.
        """
        for product in products:
            is_batch = isinstance(product, Product) and product.count > 1 and self.now.chooses
            if isinstance(product, Attention) or not (product.experts > 1 or is_batch):
                yield product
                continue
            matrices = [
                mark.weight
                for tensor, mark in zip(inputs, marks, strict=True)
                if mark.weight is not None and tensor.ndim == 3 and tensor.numel() == self._sizes[mark.weight]
            ]
            if is_batch and not matrices:
                yield product
                continue
            experts = max(product.experts, product.count)
            self.experts_of_weight.update(dict.fromkeys(matrices, experts))
            if self.now.deals_anew:
                # What the first product of a set reads is what travels.
                read = [tensor.nbytes for tensor, mark in zip(inputs, marks, strict=True) if mark.weight is None]
                self.now.work.dealt.append(max(read, default=0))
                self.now.deals_anew = False
            yield replace(product, rows=product.rows * product.count, count=1, experts=experts)

    def _write_other(
        self, func: Any, inputs: Sequence[TensorInfo], marks: Sequence[Mark], outputs: Sequence[TensorInfo]
    ) -> Callable[[TensorInfo], Mark]:
        weights = [mark.weight for mark in marks if mark.weight is not None]
        is_split = any(mark.is_split for mark in marks)
        cut = TensorSplit.ALL if is_split else TensorSplit.NOTHING
        if func.overloadpacket in _EMBEDDINGS and weights and self.cut_of_weight[weights[0]] is not TensorSplit.NOTHING:
            # Each rank looks up the rows that it has, and all add what they found.
            self.now.work.sums.append(outputs[0].nbytes)
        if not is_view(func):
            self.now.work.ops.append(OpUse(OpKind.MEMORY, (sum(tensor.nbytes for tensor in (*inputs, *outputs)),), cut))
        if inputs and len(weights) == len(inputs):
            return lambda _: Mark(weight=weights[0])
        scores = {tensor.numel() for tensor, mark in zip(inputs, marks, strict=True) if mark.is_scores}
        return lambda tensor: Mark(is_split=is_split, is_scores=tensor.numel() in scores)

    def _cut_of_product(self, name: str) -> TensorSplit:
        cut = self.cut_of_weight[name]
        # The rows of an embedding are the outputs of a product with it: the output layer that it is tied to.
        return TensorSplit.COLUMNS if cut is not TensorSplit.NOTHING and name in self._tables else cut

    def _save(self, tensor: TensorInfo) -> None:
        if tensor.storage in self._counted:
            return
        self._counted.add(tensor.storage)
        if tensor.storage_bytes:
            mark = self._mark_of(tensor)
            place = "scores" if mark.is_scores else "split" if mark.is_split else "whole"
            self.now.work.saved.append(SavedUse(place, tensor.storage_bytes))

    def _mark_of(self, tensor: TensorInfo) -> Mark:
        return self._marks.get(tensor.storage, _PLAIN)


def split_of(name: str, splits: Mapping[str, TensorSplit]) -> TensorSplit:
    """How a parameter is cut: as its module is; in a module that is cut as a piece, by columns, and one level below by rows.

    That is how ``nn.MultiheadAttention`` is made: its own matrix makes queries, keys and values, and its output layer sums up.
    """
    owner = name.rpartition(".")[0]
    if splits.get(owner, TensorSplit.ALL) is not TensorSplit.ALL:
        return splits[owner]
    if splits.get(owner) is TensorSplit.ALL:
        return TensorSplit.COLUMNS
    return TensorSplit.ROWS if splits.get(owner.rpartition(".")[0]) is TensorSplit.ALL else TensorSplit.NOTHING


def num_received(*values: Any) -> int:
    """Bytes of tensors with gradients; what has none is made of the inputs and at hand everywhere."""
    return sum(tensor.nbytes for tensor in set(tensors_in(values)) if tensor.requires_grad)


def _use_of(product: Product | Attention, cut: TensorSplit) -> OpUse:
    if isinstance(product, Product):
        return OpUse(OpKind.MATMUL, product.sizes, cut, experts=product.experts)
    width = (product.width + product.value_width) / 2
    return OpUse(OpKind.ATTENTION, product.sizes, cut, width=width, is_causal=product.is_causal)


_NOTHING = Image(0, 0, False)
_POOLS = frozenset({aten.max_pool2d_with_indices, aten.avg_pool2d, aten.max_pool2d})
_MIXING = frozenset({aten.native_group_norm, aten.native_layer_norm, aten._softmax, aten._log_softmax})
"""Operations that may look at all rows though the rows stay as many."""
_FOUR = 4


def _read_image(
    func: Any,
    named: Mapping[str, Any],
    inputs: Sequence[TensorInfo],
    outputs: Sequence[TensorInfo],
    *,
    comes_from_image: bool,
) -> Image | None:
    """What an operation does to images; None for what is done to weights and counters alone.

    Args:
        func: the operation.
        named: its arguments.
        inputs: the tensors that it reads, weights left out.
        outputs: the tensors that it makes.
        comes_from_image: one of the inputs was made by a convolution.
    """
    if not inputs or all(tensor.ndim <= 1 for tensor in (*inputs, *outputs)):
        return None
    packet = func.overloadpacket
    images = [tensor for tensor in (*inputs, *outputs) if tensor.ndim == _FOUR]
    if not outputs or outputs[0].ndim != _FOUR or packet in _MIXING:
        return _NOTHING
    rows = math.gcd(*(tensor.shape[2] for tensor in images))
    if packet is aten.convolution:
        if named["transposed"]:
            return _NOTHING
        return Image(rows, _halo(inputs[0], named["weight"].shape[2], named["stride"], named["dilation"]), True)
    if packet in _POOLS:
        kernel = named["kernel_size"]
        return Image(rows, _halo(inputs[0], kernel[0], named.get("stride") or kernel, named.get("dilation", 1)), True)
    # What keeps the rows as they are looks at each of them alone.
    keeps = all(tensor.shape[2] == rows for tensor in images)
    return Image(rows, 0, comes_from_image) if keeps else _NOTHING


def _halo(image: TensorInfo, kernel: int, stride: Any, dilation: Any) -> int:
    """Bytes of the rows that the windows of two neighbours have in common."""
    step, spread = (value[0] if isinstance(value, Sequence) else value for value in (stride, dilation))
    shared = max(0, spread * (kernel - 1) + 1 - step)
    return int(shared * image.shape[0] * image.shape[1] * image.shape[3] * image.itemsize)


def rows_of(done: Sequence[Image]) -> int:
    """A number that the degree must divide along which the rows of all these are shared out; 0 where they cannot be."""
    if not any(image.is_sure for image in done) or any(image.rows == 0 for image in done):
        return 0
    return math.gcd(*(image.rows for image in done))
