"""What ``[model]`` of a recipe can say: one frozen config per shipped model, and one for the user's own. No torch."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from shoal.core.config import Config, tagged

Count = Annotated[int, Field(ge=1)]
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]


class InitConfig(Config):
    """Weights that a model starts from, in place of those that its seed draws."""

    path: str = Field(min_length=1)
    """A checkpoint, a run directory, a safetensors file, or a Hugging Face folder."""
    strict: bool = True
    """Refuse names that did not match; false loads what fits."""
    prefix: str = ""
    """Names in the files begin with it and the model's do not; what does not begin with it is left alone."""
    rename: dict[str, str] = Field(default_factory=dict)
    """Beginnings of names in the files, and what the model has in their place."""
    only: tuple[str, ...] = ()
    """Patterns of the model's names to load, such as "encoder.*"; all when left out."""
    skip: tuple[str, ...] = ()
    """Patterns of the model's names that are left as the seed draws them, such as "head.*"."""


class LoraConfig(Config):
    """Low-rank adapters (arXiv 2106.09685), by the library peft: the model is frozen, and they alone are trained."""

    rank: Count = 8
    """Width of the adapters."""
    alpha: float = Field(default=16.0, gt=0)
    """What their output is multiplied by, over their rank."""
    targets: tuple[str, ...] = Field(min_length=1)
    """Ends of the names of the layers that get one, such as "query" and "value"; or "all-linear"."""
    dropout: Probability = 0.0
    """Probability that an input of an adapter is dropped in training."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """Which biases are trained beside them."""


class _AnyModel(Config):
    init: InitConfig | None = None
    """Weights to start from: a path, or a table."""
    lora: LoraConfig | None = None
    """Train low-rank adapters in place of the model's own weights."""

    @field_validator("init", mode="before")
    @classmethod
    def _path_alone(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value


class _Shipped(_AnyModel):
    dropout: Probability = 0.0
    """Probability that an activation is dropped in training."""
    loss: str | None = None
    """Own loss as package.module:function, called as function(output, targets); it returns the mean over the items."""


class GptConfig(_Shipped):
    """A decoder-only transformer: pre-norm, RMSNorm, rotary positions, SwiGLU, grouped-query attention."""

    name: Literal["gpt"] = "gpt"
    """Which model this is."""
    layers: Count = 4
    """Transformer blocks."""
    hidden: Count = 128
    """Width of the residual stream."""
    heads: Count = 4
    """Query heads; they divide hidden, and hidden / heads is even."""
    kv_heads: Count | None = None
    """Key-value heads; they divide heads. As many as heads when left out."""
    ffn: Count | None = None
    """Width of the feed-forward layer; 8/3 of hidden, rounded up to a multiple of 8, when left out."""
    tied: bool = False
    """One matrix for the embedding and the output layer."""

    @property
    def num_kv_heads(self) -> int:
        """Key-value heads, derived when left out."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def ffn_size(self) -> int:
        """Feed-forward width, derived when left out."""
        return derive_ffn(self.hidden) if self.ffn is None else self.ffn


class CnnConfig(_Shipped):
    """A small image classifier: two convolution-pool stages with batch norm, dropout, two linear layers."""

    name: Literal["cnn"] = "cnn"
    """Which model this is."""
    channels: tuple[Count, Count] = (16, 32)
    """Channels after the first and the second convolution."""
    hidden: Count = 64
    """Width of the first linear layer."""


class MlpConfig(_Shipped):
    """A multi-layer perceptron for anything with a fixed number of features."""

    name: Literal["mlp"] = "mlp"
    """Which model this is."""
    layers: Count = 2
    """Hidden layers."""
    hidden: Count = 128
    """Width of each hidden layer."""
    batch_norm: bool = False
    """Normalise each hidden layer over the microbatch."""


class Seq2SeqConfig(_Shipped):
    """An encoder-decoder transformer for pairs of sequences, pre-norm, with the same parts as gpt."""

    name: Literal["seq2seq"] = "seq2seq"
    """Which model this is."""
    layers: Count = 2
    """Blocks of the encoder, and as many of the decoder."""
    hidden: Count = 64
    """Width of the residual stream."""
    heads: Count = 4
    """Attention heads; they divide hidden, and hidden / heads is even."""
    ffn: Count | None = None
    """Width of the feed-forward layer; 8/3 of hidden, rounded up to a multiple of 8, when left out."""

    @property
    def ffn_size(self) -> int:
        """Feed-forward width, derived when left out."""
        return derive_ffn(self.hidden) if self.ffn is None else self.ffn


class OwnModelConfig(_AnyModel):
    """The user's own ``nn.Module``."""

    build: str
    """package.module:function that returns the module; a parameter named spec is given the shapes of the data."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the function."""
    loss: str | None = None
    """Own loss as package.module:function, called as function(output, targets); it returns the mean over the items."""


AnyModelConfig = GptConfig | CnnConfig | MlpConfig | Seq2SeqConfig | OwnModelConfig
ModelConfig = tagged(GptConfig, CnnConfig, MlpConfig, Seq2SeqConfig, OwnModelConfig, key="name")


def derive_ffn(hidden: int) -> int:
    """8/3 of ``hidden``, rounded up to a multiple of 8: SwiGLU's three matrices then weigh as much as two of 4 x hidden."""
    return -(-(8 * hidden) // 24) * 8
