"""Sees every operation of a forward pass and writes it down with its link: products by their sizes, the rest by its bytes.

It follows two things through the pass, by the storages that tensors lie in: what tensor parallelism would divide, from a layer
that is cut by columns to the one that is cut by rows; and scores, from a product of two activations to the next one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal.costs.fake import run_faked, without_memory
from shoal.costs.layers import OpKind, TensorSplit
from shoal.costs.links import Links, Saved, Seen
from shoal.costs.operations import Attention, Product, is_view, named_arguments, num_bytes, products_of, read_image
from shoal.costs.saved import SavedActivations

aten = torch.ops.aten
_CHOICES = frozenset(
    {aten.topk.default, aten.sort.default, aten.argmax.default, aten.max.dim, aten.multinomial.default}
)
"""How a router picks experts."""
_EMBEDDINGS = frozenset({aten.embedding, aten._embedding_bag})


@dataclass(frozen=True, kw_only=True)
class Mark:
    """What is known of a storage."""

    weight: int | None = None
    """The number of the parameter that it is, or was made of alone."""
    is_split: bool = False
    """A tensor-parallel rank has only its part."""
    is_scores: bool = False
    """It lies between the two products of an attention that is not fused."""
    is_image: bool = False
    """A convolution made it, or something that works on rows of images side by side."""
    is_chosen: bool = False
    """The places that something has picked: of experts for a token, or of tokens for an expert."""


_PLAIN = Mark()


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, fills the links."""

    def __init__(
        self, module: nn.Module, links: Links, mode: FakeTensorMode, *, cuts: Mapping[str, TensorSplit]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.links = links
        self.last = ""
        """The operation that came last: the one that failed, if one did."""
        self.names: list[str] = []
        """Of the parameters, by number."""
        self.cut_of_weight: list[TensorSplit] = []
        self.experts_of_weight: dict[int, int] = {}
        """Matrices that a parameter is made of, where rows are dealt out to them, by its number."""
        self._sizes = [parameter.numel() for parameter in module.parameters()]
        tables = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
        self._tables: set[int] = set()
        """Numbers of the weights of embeddings."""
        self._mode = mode
        self._marks: dict[int, Mark] = {}
        self._held: list[torch.UntypedStorage] = []
        self._saved = SavedActivations()
        self._is_paused = False
        for number, (name, parameter) in enumerate(module.named_parameters()):
            self._mark(parameter, Mark(weight=number))
            self.names.append(name)
            self.cut_of_weight.append(cut_of(name, cuts))
            if id(parameter) in tables:
                self._tables.add(number)
        for tensor in (*module.parameters(), *module.buffers()):
            self._saved.leave_out(tensor)

    def leave_out(self, inputs: Sequence[Tensor]) -> None:
        """What is at hand anyway is not counted as saved."""
        for tensor in inputs:
            self._saved.leave_out(tensor)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing is written down."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, operations and what autograd saves are written down."""
        with saved_tensors_hooks(self._save, lambda nothing: nothing), self:
            yield

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation and write it down."""
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        self.last = str(func)
        args, named = without_memory((tuple(args), dict(kwargs or {})), self._mode)
        output = run_faked(func, args, named)
        if not self._is_paused:
            self._write(func, args, named, output)
        return output

    def _write(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        inputs = _tensors((args, kwargs))
        outputs = _tensors(output)
        marks = [self._mark_of(tensor) for tensor in inputs]
        for mark in marks:
            if mark.weight is not None:
                self.links.now.weights.setdefault(mark.weight, self.names[mark.weight])
        # Not where it picks: a softmax by hand takes the largest score, and nobody asks where that was.
        self.links.now.chooses |= any(mark.is_chosen for mark in marks)
        picks = func in _CHOICES
        self.links.now.deals_anew |= picks
        image = self._write_image(func, named_arguments(func, args, kwargs), inputs, marks, outputs)
        products = products_of(func, args, kwargs, output)
        if products:
            made = self._write_products(products, inputs, marks, outputs)
        else:
            made = self._write_other(func, (args, kwargs, output), inputs, marks, outputs)
        for tensor in outputs:
            if id_of(tensor) not in self._marks:
                is_chosen = picks and not tensor.is_floating_point()
                self._mark(tensor, replace(made(tensor), is_image=image and tensor.ndim == 4, is_chosen=is_chosen))

    def _write_image(
        self,
        func: Any,
        named: Mapping[str, Any],
        inputs: Sequence[Tensor],
        marks: Sequence[Mark],
        outputs: Sequence[Tensor],
    ) -> bool:
        """Write down what an operation does to images; whether it makes one."""
        if is_view(func):
            return False
        read = [tensor for tensor, mark in zip(inputs, marks, strict=True) if mark.weight is None]
        is_from_image = any(mark.is_image for mark in marks)
        image = read_image(func, named, read, outputs, comes_from_image=is_from_image)
        if image is not None:
            self.links.now.done.images.append(image)
        return image is not None and image.is_sure and image.rows > 0

    def _write_products(
        self,
        products: Sequence[Product | Attention],
        inputs: Sequence[Tensor],
        marks: Sequence[Mark],
        outputs: Sequence[Tensor],
    ) -> Callable[[Tensor], Mark]:
        done = self.links.now.done
        weights = [
            mark.weight
            for tensor, mark in zip(inputs, marks, strict=True)
            if mark.weight is not None and tensor.ndim > 1
        ]
        is_split = any(mark.is_split for mark in marks)
        cut = self._cut_of_product(weights[0]) if weights else TensorSplit.ALL if is_split else TensorSplit.NOTHING
        for product in self._deal(products, inputs, marks):
            done.ops.append(_seen(product, cut))
            if isinstance(product, Attention):
                done.heads.append((product.heads, product.kv_heads))
                done.carried.append(inputs[1].nbytes + inputs[2].nbytes)
        if cut is TensorSplit.ROWS:
            done.sums.append(outputs[0].nbytes)
        if isinstance(products[0], Attention) or weights:
            is_split = cut in (TensorSplit.COLUMNS, TensorSplit.ALL)
            return lambda _: Mark(is_split=is_split)
        had_scores = any(mark.is_scores for mark in marks)
        if len(inputs) > 1:
            # Keys, or values: the operand that is no query and no score. A bias comes first where there is one.
            done.carried.append(inputs[-1].nbytes)
        return lambda _: Mark(is_split=is_split, is_scores=not had_scores)

    def _deal(
        self, products: Sequence[Product | Attention], inputs: Sequence[Tensor], marks: Sequence[Mark]
    ) -> Iterator[Product | Attention]:
        """The products, with those of experts seen as what they are.

        Groups of rows with a matrix of their own each are experts where torch is told of groups. A plain batch of products with
        a parameter that is a batch of matrices may as well be heads: it is experts where this layer has chosen before.
        """
        for product in products:
            is_batch = isinstance(product, Product) and product.count > 1 and self.links.now.chooses
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
            if self.links.now.deals_anew:
                # What the first product of a set reads is what travels.
                read = [tensor.nbytes for tensor, mark in zip(inputs, marks, strict=True) if mark.weight is None]
                self.links.now.done.dealt.append(max(read, default=0))
                self.links.now.deals_anew = False
            yield replace(product, rows=product.rows * product.count, count=1, experts=experts)

    def _write_other(
        self, func: Any, values: Any, inputs: Sequence[Tensor], marks: Sequence[Mark], outputs: Sequence[Tensor]
    ) -> Callable[[Tensor], Mark]:
        weights = [mark.weight for mark in marks if mark.weight is not None]
        is_split = any(mark.is_split for mark in marks)
        cut = TensorSplit.ALL if is_split else TensorSplit.NOTHING
        if func.overloadpacket in _EMBEDDINGS and weights and self.cut_of_weight[weights[0]] is not TensorSplit.NOTHING:
            # Each rank looks up the rows that it has, and all add what they found.
            self.links.now.done.sums.append(outputs[0].nbytes)
        if not is_view(func):
            self.links.now.done.ops.append(Seen(OpKind.MEMORY, (num_bytes(values),), cut))
        if inputs and len(weights) == len(inputs):
            return lambda _: Mark(weight=weights[0])
        scores = {tensor.numel() for tensor, mark in zip(inputs, marks, strict=True) if mark.is_scores}
        return lambda tensor: Mark(is_split=is_split, is_scores=tensor.numel() in scores)

    def _cut_of_product(self, number: int) -> TensorSplit:
        cut = self.cut_of_weight[number]
        # The rows of an embedding are the outputs of a product with it: the output layer that it is tied to.
        return TensorSplit.COLUMNS if cut is not TensorSplit.NOTHING and number in self._tables else cut

    def _save(self, tensor: Tensor) -> None:
        size = 0 if self._is_paused else self._saved.keep(tensor)
        if size:
            mark = self._mark_of(tensor)
            place = "scores" if mark.is_scores else "split" if mark.is_split else "whole"
            self.links.now.done.saved.append(Saved(place, size))

    def _mark(self, tensor: Tensor, mark: Mark) -> None:
        # Held, so that no other storage takes its number.
        self._held.append(tensor.untyped_storage())
        self._marks[id_of(tensor)] = mark

    def _mark_of(self, tensor: Tensor) -> Mark:
        return self._marks.get(id_of(tensor), _PLAIN)


def cut_of(name: str, cuts: Mapping[str, TensorSplit]) -> TensorSplit:
    """How a parameter is cut: as its module is; in a module that is cut as a piece, by columns, and one level below by rows.

    That is how ``nn.MultiheadAttention`` is made: its own matrix makes queries, keys and values, and its output layer sums up.
    """
    owner = name.rpartition(".")[0]
    if cuts.get(owner, TensorSplit.ALL) is not TensorSplit.ALL:
        return cuts[owner]
    if cuts.get(owner) is TensorSplit.ALL:
        return TensorSplit.COLUMNS
    return TensorSplit.ROWS if cuts.get(owner.rpartition(".")[0]) is TensorSplit.ALL else TensorSplit.NOTHING


def id_of(tensor: Tensor) -> int:
    """The number of a tensor's storage."""
    return int(tensor.untyped_storage()._cdata)


def _seen(product: Product | Attention, cut: TensorSplit) -> Seen:
    if isinstance(product, Product):
        return Seen(OpKind.MATMUL, product.sizes, cut, experts=product.experts)
    width = (product.width + product.value_width) / 2
    return Seen(OpKind.ATTENTION, product.sizes, cut, width=width, is_causal=product.is_causal)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
