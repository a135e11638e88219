"""Which plans and settings a rule of ``optim.adapt`` can be carried out under; asked before any process starts. No torch."""

from shoal.core.pipelines import schedule_facts
from shoal.core.plan import Plan
from shoal.engine.batches.schedule import batch_problems
from shoal.engine.config import TrainConfig
from shoal.optim.config import OptimConfig


def adapt_problems(optim: OptimConfig, train: TrainConfig, plan: Plan, *, evaluate_every: int) -> list[str]:
    """What is wrong with ``optim.adapt`` and ``optim.scale`` under a resolved plan, each with its fix.

    Args:
        optim: the rule.
        train: length and batch.
        plan: resolved.
        evaluate_every: ``eval.every``.
    """
    found = list(batch_problems(train, optim, plan))
    if plan.ps and (optim.scale != "none" or optim.hold_half_life):
        given = f"optim.scale {optim.scale}" if optim.scale != "none" else "optim.hold_half_life"
        found.append(
            f"{given} is not there with parameter servers, whose rules set step sizes by themselves; set "
            "optim.lr for this batch, or use a plan with dp"
        )
    if optim.adapt == "none":
        return found
    if plan.ps:
        return [
            *found,
            f"optim.adapt {optim.adapt} follows numbers of all ranks at every step, and no process of parameter servers has "
            "them; leave adapt out, or use a plan with dp",
        ]
    if optim.adapt == "bold" and evaluate_every == 0:
        found.append(
            "optim.adapt bold decides after evaluations, and eval.every is 0: there would be none; set eval.every"
        )
    if optim.adapt == "hyper" and plan.pp > 1 and schedule_facts(plan.schedule).is_asynchronous:
        found.append(
            f"optim.adapt hyper needs the whole gradient before the update, and under schedule={plan.schedule} stages update by "
            "themselves; use schedule=1f1b, or leave adapt out"
        )
    if plan.islands > 1 and optim.adapt != "bold":
        found.append(
            f"optim.adapt {optim.adapt} follows gradients of all replicas, and the {plan.islands} islands of sync={plan.sync} "
            "have their own; use adapt bold, or leave adapt or sync out"
        )
    if optim.adapt in ("noise", "adascale"):
        found += _noise_problems(optim, train, plan)
    if optim.adapt == "adascale":
        found += _adascale_problems(optim, train)
    return found


def _noise_problems(optim: OptimConfig, train: TrainConfig, plan: Plan) -> list[str]:
    """Plans under which no rank ever has the gradient of one microbatch, or there is only one."""
    cut = [name for name in ("pp", "cp") if getattr(plan, name) > 1] + (["sp"] if plan.sp else [])
    if cut:
        return [
            f"optim.adapt {optim.adapt} needs the gradient of every microbatch, which under {' and '.join(cut)} is made in parts "
            f"that are added over ranks only when the step ends; use dp, zero and tp, or leave adapt out"
        ]
    shares = plan.num_shares * (plan.microbatches or 1)
    if shares < 2:
        fix = f"set train.micro_batch to {train.global_batch // 2}" if train.global_batch % 2 == 0 else "use dp=2"
        return [
            f"optim.adapt {optim.adapt} compares the gradients of microbatches, and a step has {shares} (global_batch "
            f"{train.global_batch} in one pass); {fix} or use more replicas, so that there are at least 2"
        ]
    return []


def _adascale_problems(optim: OptimConfig, train: TrainConfig) -> list[str]:
    found = []
    if optim.scale_base is not None and optim.scale_base > train.global_batch:
        found.append(
            f"optim.adapt adascale makes up for a batch that is larger than optim.scale_base, and train.global_batch "
            f"{train.global_batch} is below {optim.scale_base}; raise global_batch, or leave adapt out"
        )
    if train.steps is None:
        found.append(
            "optim.adapt adascale counts its length in steps of optim.scale_base samples, not in epochs or tokens; set "
            "train.steps to the steps that the base batch would take"
        )
    return found
