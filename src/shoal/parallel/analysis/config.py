"""What ``[parallel]`` of a recipe can say: corrections to what Shoal finds in a module. No torch."""

from typing import Literal

from pydantic import Field

from shoal.core.config import Config

SplitWord = Literal["column", "row", "vocabulary", "logits", "none"]


class ParallelConfig(Config):
    """Where the blocks of a model are and how its layers are split, where Shoal does not find it by itself."""

    blocks: list[str] = Field(default_factory=list)
    """Paths of blocks that run one after another, such as "encoder.layers.*"; each pattern is a stack of its own."""
    split: dict[str, SplitWord] = Field(default_factory=dict)
    """Path pattern to column, row, vocabulary, logits or none, such as "blocks.*.mlp.up" = "column"; the last match wins."""
