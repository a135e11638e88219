"""What a plan must know of a model before it can say whether it fits: plain numbers, no torch.

For a shipped model they follow from its config (``models/check.py``), so a wrong plan is refused before any process starts; for
any other module they come from its analysis (``parallel/requirements.py``), which registers itself here: imports go down only.
"""

from dataclasses import dataclass
from functools import singledispatch


@dataclass(frozen=True, kw_only=True)
class Width:
    """A number of features that the tensor-parallel ranks share out."""

    name: str
    """What it is, in the user's words: ``ffn``, or the path of the layer that puts the features out."""
    size: int


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """The numbers of a model that a plan depends on. What is unknown is None and is not asked about."""

    name: str = "the model"
    num_blocks: int = 0
    """Blocks in all stacks."""
    num_pairs: int = 0
    """Layers cut along their reduction dim: each closes a column-row pair."""
    widths: tuple[Width, ...] = ()
    """Features between the layers of a pair."""
    heads: tuple[tuple[int, int], ...] = ()
    """(query heads, key-value heads) of each kind of attention that is split by heads."""
    has_attention: bool = False
    """Some block looks at other positions of its sequence, through an attention that Shoal can cut."""
    sequence: int | None = None
    """Length of the sequence."""
    has_sequence: bool = False
    """Some stack has a dim that is the sequence."""
    obstacle_sp: str = ""
    """Why sequence parallelism can cut no stack, where that is so."""
    obstacle_cp: str = ""
    """Why context parallelism cannot cut every stack that has a sequence, where that is so."""
    attention_dropout: float = 0.0
    """Largest dropout probability inside an attention, on its weights."""
    has_batch_norm: bool = False
    """Statistics over the batch are part of the forward pass."""
    keeps_statistics: bool = False
    """They are kept from step to step, beside the weights."""
    num_units: int | None = None
    """Stages that the model can be cut into at most."""
    tied_ends: str = ""
    """A weight that both the first and the last unit read, where there is one."""
    note: str = ""
    """Why nothing could be found, where that is so."""


@singledispatch
def model_facts(model: object) -> ModelFacts | None:
    """The facts of a model given as facts, or as anything that a room above has registered; None where nothing is known."""
    return model if isinstance(model, ModelFacts) else None
