"""How the gradients of a run are pushed, as workers and servers both derive it. Apart from ``process.py``: it needs torch."""

from shoal.core.compressrule import CompressRule
from shoal.paramserver.pushcodec import PushCodec
from shoal.paramserver.sharding import Model
from shoal.serverrun.process import ProcessSpec


def push_codec(spec: ProcessSpec, model: Model) -> PushCodec | None:
    """The codec that plan and recipe say; None where gradients go as they are."""
    if spec.plan.compress is None:
        return None
    rule, train = CompressRule.parse(spec.plan.compress), spec.recipe.train
    return PushCodec(rule, spec.recipe.compression, model=model, seed=train.seed, num_shares=spec.plan.num_shares)
