"""The ``[optim]`` section of a recipe, and the names of the precisions. No torch: the command line reads it."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from shoal.core.config import Config

PrecisionName = Literal["float32", "bfloat16", "float16", "float64"]
OptimizerName = Literal["sgd", "momentum", "nesterov", "adam", "adamw", "adagrad", "lars", "lamb"]
ScheduleName = Literal["constant", "cosine", "linear", "inverse_sqrt", "plateau"]

Finite = Annotated[float, Field(allow_inf_nan=False)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Config):
    """How gradients become new weights, and how fast."""

    name: OptimizerName = "adamw"
    """Update rule: sgd, momentum, nesterov, adam, adamw, adagrad; lars and lamb for large batches."""
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

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> "OptimConfig":
        if self.name in ("momentum", "nesterov") and self.momentum == 0:
            raise ValueError(
                f"{self.name} with momentum 0 is plain sgd; set name to sgd, or momentum above 0 such as 0.9"
            )
        return self
