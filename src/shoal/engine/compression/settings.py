"""Settings of a recipe that do not go with the codec of its plan: pure, no torch, refused before a process starts.

What does not go with the rest of the plan is refused by ``core/planrules.py``.
"""

from shoal.compression.config import CompressionConfig, has_residual
from shoal.core.compressrule import CompressRule
from shoal.core.errors import RequestError
from shoal.core.plan import Plan
from shoal.engine.config import Settings, TrainConfig
from shoal.optim.config import OptimConfig


def check_compression(settings: Settings, plan: Plan) -> None:
    """Refuse settings that do not go with the plan's codec.

    Raises:
        RequestError: lists them with their fixes.
    """
    found = compression_settings(settings.train, settings.optim, settings.compression, plan)
    if found:
        raise RequestError("\n".join(f"plan {str(plan)!r}: {problem}" for problem in found))


def compression_settings(train: TrainConfig, optim: OptimConfig, config: CompressionConfig, plan: Plan) -> list[str]:
    """Settings that do not go with the plan's codec, each with its fix."""
    found = _weight_problems(train, config, plan)
    if plan.compress is None:
        return found
    rule = CompressRule.parse(plan.compress)
    if train.precision == "float64":
        found.append(
            f"compress={plan.compress} sends float32 and less, and train.precision is float64; use float32, or leave compress out"
        )
    if train.precision == "float16" and (has_residual(rule, config) or rule.kind == "dgc"):
        found.append(
            f"compress={plan.compress} keeps what it has not sent for later steps, and train.precision float16 scales each "
            f"step's loss otherwise; use bfloat16, or a codec without a residual, such as compress=int8"
        )
    if rule.kind == "dgc" and _has_momentum(optim):
        found.append(
            f"compress={plan.compress} has a momentum of its own (compression.momentum {config.momentum:g}), and optim.name "
            f"{optim.name} adds another; use optim.name=sgd"
        )
    if rule.kind in ("dgc", "onebit") and plan.pp > 1 and optim.clip is not None:
        found.append(
            f"compress={plan.compress} clips each replica's own gradient to optim.clip {optim.clip:g}, and with pp={plan.pp} no "
            f"rank has all of it; leave clip or pp out"
        )
    if rule.kind == "onebit" and optim.name not in ("adam", "adamw", "lamb"):
        found.append(
            f"compress={plan.compress} sends the momentum of adam, adamw or lamb, and optim.name is {optim.name}; use one of "
            f"them, or compress=int8"
        )
    if rule.kind == "onebit" and optim.name == "adam" and optim.weight_decay > 0:
        found.append(
            f"compress={plan.compress} sends momenta, into which adam would mix optim.weight_decay {optim.weight_decay:g}; use "
            f"optim.name=adamw, whose decay is beside it"
        )
    if rule.kind == "onebit" and train.unused_parameters:
        found.append(
            f"compress={plan.compress} freezes every variance at one step, and train.unused_parameters leaves some without any; "
            f"set unused_parameters=false, or use compress=int8"
        )
    if rule.kind == "onebit" and optim.hold_half_life and train.batch_schedule is not None:
        found.append(
            f"compress={plan.compress} freezes the variance with the decay of one step, and optim.hold_half_life changes it "
            f"with every batch of train.batch_schedule; leave one of the two out, or use compress=int8"
        )
    if rule.kind == "onebit" and optim.adapt != "none":
        found.append(
            f"compress={plan.compress} never sums gradients, and optim.adapt {optim.adapt} reads them; leave adapt out, or use "
            f"compress=int8"
        )
    return found


def _weight_problems(train: TrainConfig, config: CompressionConfig, plan: Plan) -> list[str]:
    """What is wrong with weights that are gathered by a codec."""
    if config.weights == "none":
        return []
    found, said = [], f"compression.weights {config.weights}"
    if not plan.zero:
        found.append(
            f"{said} is of weights that ZeRO gathers, and zero is 0; set zero to 1, 2 or 3, or leave weights out"
        )
    if plan.tp > 1:
        found.append(f"{said} cuts rows into blocks, and tp={plan.tp} cuts them otherwise; leave tp or weights out")
    if train.precision == "float64":
        found.append(f"{said} is of float32, and train.precision is float64; use float32, or leave weights out")
    return found


def _has_momentum(optim: OptimConfig) -> bool:
    if optim.name in ("momentum", "nesterov", "lars"):
        return optim.momentum > 0
    return bool(optim.args.get("momentum", 0))
