"""The ``[optim]`` section of a recipe, and the names of the precisions. No torch: the command line reads it."""

from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from shoal.core.config import Config
from shoal.core.errors import did_you_mean

PrecisionName = Literal["float32", "bfloat16", "float16", "float64"]
_WITH_MOMENTUM = ("momentum", "nesterov", "lars")
OptimizerName = Literal["sgd", "momentum", "nesterov", "adam", "adamw", "adagrad", "lars", "lamb"]
TORCH = "torch.optim."
"""How the name of an optimizer begins that is a class of torch."""
ScheduleName = Literal["constant", "cosine", "linear", "inverse_sqrt", "plateau"]
AdaptName = Literal["none", "noise", "adascale", "bold", "hyper"]

Finite = Annotated[float, Field(allow_inf_nan=False)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class GroupConfig(Config):
    """Parameters that are trained otherwise than the rest, by the pattern of their names; the first pattern that fits counts."""

    match: str = Field(min_length=1)
    """Names of parameters, where * stands for any characters: "blocks.0.*", "*.bias", "head.weight"."""
    lr: Finite | None = Field(default=None, gt=0)
    """Their learning rate at its highest, in place of optim.lr; the schedule is the same."""
    lr_factor: Finite | None = Field(default=None, gt=0)
    """The same as a multiple of optim.lr; give one of the two."""
    weight_decay: Finite | None = Field(default=None, ge=0)
    """Their weight decay, in place of optim.weight_decay."""
    frozen: bool = False
    """Not trained at all."""

    @model_validator(mode="after")
    def _says_something(self) -> "GroupConfig":
        given = {key: getattr(self, key) for key in ("lr", "lr_factor", "weight_decay")}
        said = [f"{key} {value:g}" for key, value in given.items() if value is not None]
        if self.frozen and said:
            raise ValueError(f"{self.match!r} is frozen, and has {' and '.join(said)}; leave one of them out")
        if not self.frozen and not said:
            raise ValueError(f"{self.match!r} says nothing; give it lr, lr_factor, weight_decay or frozen = true")
        if self.lr is not None and self.lr_factor is not None:
            raise ValueError(f"{self.match!r} has lr {self.lr:g} and lr_factor {self.lr_factor:g}; give one of them")
        return self


class OptimConfig(Config):
    """How gradients become new weights, and how fast."""

    name: str = "adamw"
    """Update rule: sgd, momentum, nesterov, adam, adamw, adagrad; lars and lamb for large batches; or torch.optim.CLASS."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of a torch.optim.CLASS, beside lr and weight_decay; left out, torch's own defaults."""
    lr: Finite = Field(default=1e-3, gt=0)
    """Learning rate at its highest, after warm-up."""
    momentum: Decay = 0.9
    """Share of the last update that is kept (momentum, nesterov, lars)."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay of the first and second moment (adam, adamw, lamb)."""
    eps: Finite | None = Field(default=None, gt=0)
    """Added to the denominator; left out, 1e-8 for adam and adamw, 1e-10 for adagrad, 1e-6 for lamb (the others have none)."""
    weight_decay: Finite = Field(default=0.0, ge=0)
    """Pull of every weight towards zero: beside the gradient's step in adamw and lamb, added to the gradient in the others."""
    exempt_1d: bool = True
    """Leave biases, the parameters of norms and all other one-dimensional tensors out of weight decay and of the trust ratio."""
    groups: tuple[GroupConfig, ...] = ()
    """Parameters with a rate or a decay of their own, or frozen, by the pattern of their names."""
    clip: Finite | None = Field(default=None, gt=0)
    """Longest gradient allowed: a longer one is scaled down to this norm, over all parameters together."""
    schedule: ScheduleName = "constant"
    """Learning rate after warm-up: constant, cosine, linear, inverse_sqrt, or plateau (falls when evaluations stop improving)."""
    warmup: int = Field(default=0, ge=0)
    """Steps in which the rate rises in equal parts before it reaches ``lr``; updates, where every microbatch is one."""
    final: Finite = Field(default=0.0, ge=0, le=1)
    """Fraction of ``lr`` that cosine and linear come down to when the last step is done."""
    plateau_factor: Finite = Field(default=0.5, gt=0, lt=1)
    """What plateau multiplies the rate by."""
    plateau_patience: int = Field(default=3, ge=1)
    """Evaluations in a row without improvement after which plateau lowers the rate."""
    plateau_threshold: Finite = Field(default=1e-4, ge=0, lt=1)
    """Smallest improvement that plateau counts, as a fraction of the best loss."""
    trust: Finite = Field(default=0.001, gt=0)
    """Trust coefficient of lars: how far a layer may move, as a fraction of its norm."""
    scale: Literal["none", "linear", "sqrt"] = "none"
    """How the rate follows the batch: times global_batch / scale_base (linear, for sgd), or its root (sqrt, for adam)."""
    scale_base: int | None = Field(default=None, ge=1)
    """The global batch, in samples, that ``lr`` was tuned for; for scale and adascale."""
    hold_half_life: bool = False
    """Let betas[1] reach back over as many samples with any batch: to the power of batch / scale_base, or / the first batch."""
    adapt: AdaptName = "none"
    """What the rate follows besides: noise only measures the gradient noise scale; adascale, bold (validation loss), hyper."""
    adapt_every: int = Field(default=1, ge=1)
    """Steps between measurements of the gradient noise (noise, adascale)."""
    adapt_smoothing: Finite = Field(default=0.999, gt=0, lt=1)
    """How much of the averages of noise and adascale stays after a batch of scale_base samples."""
    adapt_raise: Finite = Field(default=1.05, ge=1)
    """What bold multiplies the rate by when the validation loss falls below its best."""
    adapt_lower: Finite = Field(default=0.5, gt=0, le=1)
    """What bold multiplies the rate by when the validation loss rises above the one before."""
    adapt_threshold: Finite = Field(default=1e-3, ge=0, lt=1)
    """Smallest fall or rise that bold counts, as a fraction of the loss."""
    adapt_step: Finite = Field(default=0.01, gt=0, lt=1)
    """How far hyper may change the rate in a step: times 1 + this x the cosine of the gradient and the last update."""
    adapt_bounds: tuple[Finite, Finite] = (0.05, 10.0)
    """Least and most that bold and hyper multiply the rate by."""

    @property
    def is_torch_class(self) -> bool:
        """True when the optimizer is named by its class in torch (``optim/torchclass.py``)."""
        return self.name.startswith(TORCH)

    @field_validator("name")
    @classmethod
    def _has_rule(cls, name: str) -> str:
        # Which classes there are is known to torch, which is not imported here.
        if name not in get_args(OptimizerName) and not name.startswith(TORCH):
            raise ValueError(
                f"there is no {name!r}, and an optimizer of torch is named by its class, such as {TORCH}NAdam; "
                f"{did_you_mean(name, get_args(OptimizerName))}"
            )
        return name

    @model_validator(mode="after")
    def _arguments_have_a_taker(self) -> "OptimConfig":
        if self.args and not self.is_torch_class:
            given = ", ".join(sorted(self.args))
            raise ValueError(
                f"args ({given}) are for a class of torch, and name is {self.name}; set name to such as {TORCH}AdamW, or leave "
                f"args out"
            )
        if self.is_torch_class:
            # Compared with the default: a resolved recipe has every key.
            for key in ("momentum", "betas", "eps", "trust"):
                value = getattr(self, key)
                if value != type(self).model_fields[key].default:
                    raise ValueError(f"{key} {value} is not read by {self.name}; set args.{key}, if it takes that")
        return self

    @model_validator(mode="after")
    def _decays_fit(self) -> "OptimConfig":
        if self.is_torch_class and any(group.weight_decay for group in self.groups) and not self.weight_decay:
            raise ValueError(
                f"groups with a weight_decay of their own need weight_decay above 0 with {self.name}, of which not every class "
                "has one; set weight_decay, and 0 for the groups that have none"
            )
        return self

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> "OptimConfig":
        if self.name in ("momentum", "nesterov") and self.momentum == 0:
            raise ValueError(
                f"{self.name} with momentum 0 is plain sgd; set name to sgd, or momentum above 0 such as 0.9"
            )
        return self

    @model_validator(mode="after")
    def _momentum_has_a_reader(self) -> "OptimConfig":
        # A resolved recipe has every key, whoever reads it; one that people write does not have all of these.
        is_written = "momentum" in self.model_fields_set and not {"betas", "trust"} <= self.model_fields_set
        if is_written and self.momentum and not self.is_torch_class and self.name not in _WITH_MOMENTUM:
            way_out = "set name to momentum or nesterov" if self.name == "sgd" else "adam and its kin have betas"
            raise ValueError(f"momentum {self.momentum:g} is not read by {self.name}; {way_out}, or leave momentum out")
        return self

    @model_validator(mode="after")
    def _scale_has_a_base(self) -> "OptimConfig":
        if self.scale != "none" and self.scale_base is None:
            raise ValueError(
                f"scale {self.scale} multiplies lr {self.lr:g} by the batch over the one that it was tuned for, which is not "
                "given; set scale_base to that batch, such as 32"
            )
        if self.adapt == "adascale" and self.scale_base is None:
            raise ValueError(
                "adapt adascale needs the batch that lr was tuned for, and scale_base is not given; set scale_base, such as 32"
            )
        if self.adapt == "adascale" and self.scale != "none":
            raise ValueError(
                f"adapt adascale and scale {self.scale} would both multiply the rate for the batch; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _holds_what_it_has(self) -> "OptimConfig":
        if self.hold_half_life and self.name not in ("adam", "adamw", "lamb"):
            raise ValueError(
                f"hold_half_life is of the second moment, which {self.name} has none of here; use adam, adamw or lamb, or "
                "leave it out"
            )
        return self

    @model_validator(mode="after")
    def _adapts_alone(self) -> "OptimConfig":
        least, most = self.adapt_bounds
        if not 0 < least <= 1 <= most:
            raise ValueError(
                f"adapt_bounds [{least:g}, {most:g}] must have 1, where the rate begins, between them, and the least above 0; "
                "set them to such as [0.05, 10]"
            )
        if self.adapt == "bold" and self.schedule == "plateau":
            raise ValueError(
                "adapt bold and schedule plateau would both change the rate after evaluations; leave one of them out"
            )
        return self
