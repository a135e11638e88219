"""What a module is made of, as far as parallelism cares, and what a recipe may say about it: plain values. No torch.

``analysis/analyse.py`` fills them in from any ``nn.Module``; the recipe's ``[parallel]`` section overrides them; every technique
acts on them and never looks at class names itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from pydantic import Field

from shoal.core.config import Config


class SplitKind(StrEnum):
    """How a module's matrix is cut over the tensor-parallel ranks."""

    COLUMN = "column"
    """Along the output dim: every rank computes some of the outputs from all inputs."""
    ROW = "row"
    """Along the reduction dim: every rank computes a partial sum of all outputs from some of the inputs."""
    VOCABULARY = "vocabulary"
    """An embedding, along its rows."""
    LOGITS = "logits"
    """The output layer, along the vocabulary: its outputs stay split, and the loss is computed from the parts."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """One module whose weight is cut."""

    path: str
    kind: SplitKind
    parts: int = 1
    """Equal parts stacked along the cut dim, each cut by itself: 3 for a fused query-key-value matrix."""


@dataclass(frozen=True, kw_only=True)
class Heads:
    """One attention module, all of whose projections are split by heads."""

    path: str
    num_heads: int
    num_kv_heads: int
    divided: Mapping[str, int] = field(default_factory=dict)
    """Attributes of the module that count heads or their features, with their whole values; each rank gets its share."""
    dropout: float = 0.0
    """Dropout probability inside the attention itself, on its weights."""
    is_torch: bool = False
    """True for ``nn.MultiheadAttention``, which computes inside one function and is split as a piece."""


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A row of blocks of one kind, run one after another."""

    blocks: tuple[str, ...]
    """Module paths, in the order of execution."""
    sequence_dim: int | None = None
    """The dim of the blocks' first input and output that is the sequence; None where there is no sequence."""
    is_pointwise: bool = True
    """Outside attention no block mixes positions, so a sequence can be cut between its split layers."""


@dataclass(frozen=True, kw_only=True)
class ModuleAnalysis:
    """What was found in a module."""

    stacks: tuple[Stack, ...] = ()
    splits: tuple[Split, ...] = ()
    attentions: tuple[Heads, ...] = ()
    attends: tuple[str, ...] = ()
    """Modules that call torch's attention function, whether their heads can be split or not."""
    dropout_calls: Mapping[str, tuple[bool, ...]] = field(default_factory=dict)
    """Of the next ones, those that are called on whole tensors too: for each call of a pass, if it sees split features."""
    split_dropouts: Mapping[str, int] = field(default_factory=dict)
    """Dropout modules that lie between a column and a row layer: path, and the dim (usually -1) whose features are split."""
    tied: tuple[tuple[str, ...], ...] = ()
    """Parameter names that are one tensor, first name first."""
    read_outside: frozenset[str] = frozenset()
    """Parameters that are read while their own module does not run, as in ``F.linear(x, self.embedding.weight)``."""
    sequence: int | None = None
    """Length of the sequence in the example that was traced."""
    tail_is_pointwise: bool = False
    """What comes after the last stack treats each position by itself, so a context-parallel rank may keep its own positions."""
    replicated: Mapping[str, str] = field(default_factory=dict)
    """Modules with weights that stay whole on every tensor-parallel rank, and why."""


SplitWord = Literal["column", "row", "vocabulary", "logits", "none"]


class ParallelConfig(Config):
    """``[parallel]`` of a recipe: where the blocks of a model are and how its layers are split, if the analysis is not enough."""

    blocks: list[str] = Field(default_factory=list)
    """Paths of blocks that run one after another, such as "encoder.layers.*"; each pattern is a stack of its own."""
    split: dict[str, SplitWord] = Field(default_factory=dict)
    """Path pattern to column, row, vocabulary, logits or none, such as "blocks.*.mlp.up" = "column"; the last match wins."""
