"""What ``[planner]`` of a recipe can say: a model by its numbers, devices of one's own, whose software runs, how long to look."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from shoal.core.config import Config
from shoal.planner.hardware.devices import DeviceConfig

Count = Annotated[int, Field(ge=1)]
Size = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0.0)]


class ShapeConfig(Config):
    """A transformer of this shape, planned for in place of the recipe's module."""

    layers: Count
    """Blocks."""
    hidden: Count
    """Width of the residual stream."""
    heads: Count
    """Query heads."""
    vocab: Count
    """Number of token ids."""
    sequence: Count
    """Tokens of a sample."""
    kv_heads: Count | None = None
    """Key-value heads; as many as heads when left out."""
    ffn: Count | None = None
    """Width of the feed-forward; four times hidden when left out."""
    gated: bool = False
    """Three matrices in the feed-forward (SwiGLU), RMSNorm, no biases."""
    tied: bool = False
    """One matrix for the embedding and the output layer."""
    experts: Count = 1
    """Routed experts of a block."""
    chosen_experts: Count = 1
    """Experts that a token goes to."""
    expert_ffn: Count | None = None
    """Width of an expert; that of the feed-forward when left out."""
    shared_ffn: Size = 0
    """Width of the expert that every token goes to, of all such experts together; 0 without."""
    dense_layers: Size = 0
    """Blocks at the beginning that have a feed-forward in place of experts."""
    head_size: Count | None = None
    """Features of a head; hidden over heads when left out. With latent attention without the 64 of its position, and 128."""
    query_rank: Size = 0
    """Latent attention: features that queries are compressed to; 0 without compression."""
    kv_rank: Size = 0
    """Latent attention (MLA): features that keys and values are compressed to; 0 for ordinary attention."""

    @model_validator(mode="after")
    def _fits_together(self) -> "ShapeConfig":
        if self.experts == 1:
            for name in ("dense_layers", "shared_ffn"):
                if getattr(self, name):
                    raise ValueError(
                        f"{name} is {getattr(self, name)}, beside experts of which there are {self.experts}; give experts, or "
                        f"leave {name} out"
                    )
        if self.dense_layers >= self.layers:
            raise ValueError(
                f"dense_layers is {self.dense_layers} of {self.layers} layers, and none is left for the experts; give "
                f"{self.layers - 1} or fewer"
            )
        if self.query_rank and not self.kv_rank:
            raise ValueError(
                f"query_rank is {self.query_rank} and kv_rank {self.kv_rank}: queries are compressed where keys and values are; "
                f"give kv_rank, or leave query_rank out"
            )
        if self.kv_rank and self.kv_heads not in (None, self.heads):
            raise ValueError(
                f"kv_rank is {self.kv_rank} and kv_heads {self.kv_heads}: with latent attention each of the {self.heads} heads "
                f"has keys of its own; leave kv_heads out"
            )
        return self


class AutoConfig(Config):
    """How long ``--plan auto`` may look before the run begins."""

    search_seconds: Positive = 45.0
    """Seconds in which plans are rehearsed; when they are over, what was found until then counts."""
    finalists: Count = 8
    """Plans that are tried for real steps, at most: of those predicted within a quarter of the best, not all of one family."""
    try_seconds: Annotated[float, Field(ge=0.0)] = 60.0
    """Seconds in which finalists are tried, in rounds, until one is clearly best; 0 takes the best predicted one untried."""


class PlannerConfig(Config):
    """Planning."""

    auto: AutoConfig = AutoConfig()
    """How long ``--plan auto`` may look."""

    shape: ShapeConfig | None = None
    """A transformer by its numbers, in place of the recipe's module."""
    devices: dict[str, DeviceConfig] = Field(default_factory=dict)
    """Devices by the user's own numbers."""
    software: str = "shoal"
    """Whose constants are used: shoal, fsdp, torchtitan, megatron, megatron-core, megatron-core-graphs, megatron-deepspeed or
    bigscience."""
    precisions: list[Literal["float64", "float32", "bfloat16", "float16", "float8", "float4"]] = Field(
        default_factory=list
    )
    """Compute types that ``shoal plan`` ranks together; without any it ranks ``train.precision``, and shows faster ones below."""
