"""A model as a list of layers: what each computes, saves for its backward pass and hands on, as plain numbers. No torch.

Everything is of **one sample** on **one device**, so that a plan can be priced by arithmetic: the planner multiplies by the
samples of a microbatch and divides by what a technique splits. Bytes of activations are those of the compute type that the costs
were made for; weights are counted in elements, because precision and optimizer decide their bytes.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property


class OpKind(StrEnum):
    """What bounds an operation."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    """Queries with keys, and scores with values, in one fused kernel or in several."""
    MEMORY = "memory"
    """Reads and writes: norms, activations, dropout, residual sums, embeddings, losses."""


class TensorSplit(StrEnum):
    """What tensor parallelism divides of an operation."""

    NOTHING = "nothing"
    """Done whole on every rank; sequence parallelism divides its rows."""
    COLUMNS = "columns"
    """The columns of a matrix product: ``outer``."""
    ROWS = "rows"
    """The reduced dim of a matrix product: ``inner``."""
    ALL = "all"
    """Heads of an attention, or elements between the two layers of a pair."""


@dataclass(frozen=True, kw_only=True)
class Op:
    """One kind of kernel in a layer's forward pass on one sample.

    A matrix product multiplies (``rows``, ``inner``) by (``inner``, ``outer``). An attention has ``heads`` of ``inner`` features
    that look from ``rows`` positions at ``outer`` positions.
    """

    kind: OpKind
    rows: float = 0.0
    inner: float = 0.0
    outer: float = 0.0
    heads: float = 1.0
    num_bytes: float = 0.0
    """Read and written, where ``kind`` is MEMORY; what an attention that is not fused reads and writes besides its products."""
    cut: TensorSplit = TensorSplit.NOTHING
    experts: int = 1
    """Experts that the rows are dealt out to, each with a matrix of its own; ``ep`` divides them."""
    is_fused: bool = True
    """An attention in one kernel that never writes its scores."""
    causal: bool = True
    """An attention that looks back only; a fused one then does half of the products."""
    count: int = 1
    """How many of these there are."""

    @property
    def flops(self) -> float:
        """Of the forward pass, of all ``count``; the products that a causal mask throws away are counted too."""
        if self.kind is OpKind.MATMUL:
            return 2.0 * self.rows * self.inner * self.outer * self.count
        if self.kind is OpKind.ATTENTION:
            return 4.0 * self.rows * self.inner * self.outer * self.heads * self.count
        return 0.0


@dataclass(frozen=True, kw_only=True)
class SavedBytes:
    """Bytes that a layer keeps for its backward pass, of one sample."""

    whole: float = 0.0
    """Between the split regions: every tensor-parallel rank has all of it, unless sequence parallelism divides it."""
    split: float = 0.0
    """Inside them: divided by ``tp``."""
    scores: float = 0.0
    """What selective recompute does not keep: attention's scores; divided by ``tp``."""
    boundary: float = 0.0
    """The layer's input: all that full recompute keeps; counted in ``whole`` too."""

    def __add__(self, other: "SavedBytes") -> "SavedBytes":
        return SavedBytes(
            whole=self.whole + other.whole,
            split=self.split + other.split,
            scores=self.scores + other.scores,
            boundary=self.boundary + other.boundary,
        )


class LayerKind(StrEnum):
    """Where a layer stands."""

    EMBEDDING = "embedding"
    BLOCK = "block"
    HEAD = "head"
    OTHER = "other"


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer: the smallest thing that a pipeline stage can be made of. Equal layers may have different names."""

    name: str = field(compare=False)
    kind: LayerKind
    ops: tuple[Op, ...] = ()
    whole_weights: float = 0.0
    """Elements that every tensor-parallel rank has: norms, biases after the sum."""
    split_weights: float = 0.0
    """Elements that ``tp`` divides."""
    expert_weights: float = 0.0
    """Elements that ``ep`` divides (and ``tp`` where it splits experts)."""
    kept: SavedBytes = SavedBytes()
    output_bytes: float = 0.0
    """What goes on to the next layer, of one sample."""
    num_pairs: int = 0
    """Column-row pairs: with ``tp`` each ends its forward pass, and begins its backward pass, with a sum over the ranks."""
    pair_bytes: float = 0.0
    """Bytes of one such sum, of one sample."""
    routed_bytes: float = 0.0
    """Bytes that leave for the experts of other ranks, and as many that come back, of one sample; 0 without experts."""
    kv_bytes: float = 0.0
    """Keys and values that travel around a context-parallel ring, of one sample."""
    image_rows: int = 0
    """Of the images that it works on row by row: a number that ranks which share the rows out must divide; 0 where it is no such
    layer."""
    halo_bytes: float = 0.0
    """Bytes of one sample that two neighbours which share the rows out read of each other's, together."""
    tied_to: str | None = None
    """The layer whose ``split_weights`` this one reads as well; they are counted there alone."""
    parameters: tuple[tuple[str, tuple[int, ...]], ...] = field(default=(), compare=False)
    """Names and shapes of its trained parameters; empty where the model stands by its numbers (``shapes`` has a guess)."""

    @property
    def weights(self) -> float:
        """Elements of all weights of one replica."""
        return self.whole_weights + self.split_weights + self.expert_weights

    @cached_property
    def cuts_experts(self) -> bool:
        """Whether tensor parallelism divides the matrices of experts; those of a traced module stay whole."""
        return any(op.experts > 1 and op.cut is not TensorSplit.NOTHING for op in self.ops)

    @property
    def forward_flops(self) -> float:
        """Of one sample."""
        return sum(op.flops for op in self.ops)

    @property
    def shapes(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Its trained parameters; of a layer by its numbers the matrices of its products, and all else as one vector."""
        if self.parameters or not self.weights:
            return self.parameters
        matrices = [
            (max(1, round(op.inner)), max(1, round(op.outer)))
            for op in self.ops
            if op.kind is OpKind.MATMUL
            for _ in range(op.count * op.experts)
        ]
        if self.tied_to:
            matrices = []  # Its product reads the other layer's.
        rest = round(self.weights) - sum(rows * columns for rows, columns in matrices)
        named = [(f"{self.name}.{place}", shape) for place, shape in enumerate(matrices)]
        return (*named, *([(f"{self.name}.rest", (rest,))] if rest > 0 else []))


@dataclass(frozen=True, kw_only=True)
class ModelCosts:
    """A model, in the order in which a sample goes through it."""

    name: str
    layers: tuple[Layer, ...]
    tokens: float = 1.0
    """Tokens of one sample; 1 where a sample is not a sequence."""
    item_bytes: int = 2
    """Bytes of one element of an activation."""
    heads: int | None = None
    """Query heads, where all attentions have the same number; what ``tp`` must divide."""
    kv_heads: int | None = None
    experts: int = 1
    """Routed experts of a layer; what ``ep`` must divide."""

    @cached_property
    def weights(self) -> float:
        """Elements of all weights."""
        return sum(layer.weights for layer in self.layers)

    @cached_property
    def num_blocks(self) -> int:
        """Layers that are blocks."""
        return sum(layer.kind is LayerKind.BLOCK for layer in self.layers)

    @cached_property
    def forward_flops(self) -> float:
        """Of one sample."""
        return sum(layer.forward_flops for layer in self.layers)

    @cached_property
    def block_range(self) -> tuple[int, int]:
        """The first block and the end of the last; of a model without blocks, all its layers."""
        blocks = [at for at, layer in enumerate(self.layers) if layer.kind is LayerKind.BLOCK] or [
            *range(len(self.layers))
        ]
        return blocks[0], blocks[-1] + 1

    @cached_property
    def distinct(self) -> tuple[Layer, ...]:
        """Every kind of layer once: a thousand equal blocks are priced once."""
        return tuple(dict.fromkeys(self.layers))

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """Of each layer, its place in ``distinct``."""
        place = {layer: at for at, layer in enumerate(self.distinct)}
        return tuple(place[layer] for layer in self.layers)
