"""How the gradients of a run are pushed, as workers and servers both derive it. Apart from ``process.py``: it needs torch."""

from shoal.core.compressrule import CompressRule
from shoal.paramserver.consistency import is_share_of_step
from shoal.paramserver.pushcodec import PushCodec
from shoal.paramserver.sharding import Model
from shoal.serverrun.process import ProcessSpec


def push_codec(spec: ProcessSpec, model: Model, total_steps: int) -> PushCodec | None:
    """The codec that plan and recipe say, of a run of so many steps; None where gradients go as they are."""
    if spec.plan.compress is None:
        return None
    rule, train = CompressRule.parse(spec.plan.compress), spec.recipe.train
    return PushCodec(
        rule,
        spec.recipe.compression,
        model=model,
        seed=train.seed,
        num_shares=spec.plan.num_shares,
        saved_every=spec.recipe.checkpoint.every if saves_residuals(spec) else 0,
        last_step=total_steps,
    )


def saves_residuals(spec: ProcessSpec) -> bool:
    """Whether checkpoints have what workers keep: under bsp each of them has pushed once for each step that one is of.

    Under the other rules a checkpoint is of a version of the weights, and workers are anywhere around it.
    """
    config = spec.recipe.paramserver
    return spec.plan.compress is not None and spec.rule.kind == "bsp" and is_share_of_step(spec.rule, config.aggregate)
