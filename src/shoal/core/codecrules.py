"""Which plans a codec goes with: pure functions that return what is wrong, as those of ``planrules.py`` do for the other keys."""

from collections.abc import Iterator

from shoal.core.compressrule import COSTLY, CompressRule
from shoal.core.errors import RequestError
from shoal.core.pipelines import schedule_facts
from shoal.core.planrules import PlanKeys
from shoal.core.syncrule import SyncRule


def compress_problems(plan: PlanKeys) -> Iterator[str]:
    """What is wrong with the codec of a plan."""
    if plan.compress is None:
        return
    try:
        rule = CompressRule.parse(plan.compress)
    except RequestError as error:
        yield str(error)
        return
    if plan.dp == 1 and plan.islands == 1 and not plan.ps and plan.sync == "allreduce":
        yield (
            f"compress={plan.compress} is of what replicas send each other, and dp=1 has one; set dp=2 or more, or leave "
            f"compress out"
        )
    splits = {"tp": plan.tp, "cp": plan.cp, "ep": plan.ep}
    for key, degree in splits.items():
        if degree > 1:
            yield (
                f"compress={plan.compress} does not go with {key}={degree}: a split layer rounds its gradient otherwise than one "
                f"process, and a codec turns the last bit of a number into another code; leave compress or {key} out"
            )
    if plan.pp > 1 and schedule_facts(plan.schedule).is_asynchronous:
        yield (
            f"compress={plan.compress} does not go with schedule={plan.schedule}: its stages update by themselves, at different "
            f"times, and what a codec lost belongs to a step; use schedule=1f1b, or leave compress out"
        )
    if plan.ps:
        yield from _push_codec_problems(plan, rule)
    if plan.islands > 1 or plan.sync != "allreduce":
        yield from _island_codec_problems(plan, rule)
    if rule.kind == "onebit":
        yield from _onebit_problems(plan, rule)


_NOT_PUSHED = {
    "powersgd": "its factors are sums over all replicas at one step, and a server gets pushes one at a time",
    "dgc": "its momentum and clipping are those of replicas that take every step together",
    "onebit": "replicas agree on a momentum, and here the servers have it",
}


def _push_codec_problems(plan: PlanKeys, rule: CompressRule) -> Iterator[str]:
    """What workers cannot push compressed."""
    if rule.kind in _NOT_PUSHED:
        yield (
            f"compress={plan.compress} does not go with ps={plan.ps}: {_NOT_PUSHED[rule.kind]}; use such as compress=int8 or "
            f"compress=topk:0.01, or dp"
        )
    if plan.update == "lbfgs" or (plan.update or "").startswith("lbfgs"):
        yield (
            f"compress={plan.compress} does not go with update={plan.update}: a line search compares gradients to the last "
            f"digits of a loss; leave compress out, or use update=bsp"
        )


def _island_codec_problems(plan: PlanKeys, rule: CompressRule) -> Iterator[str]:
    try:
        sync = SyncRule.parse(plan.sync)
    except RequestError:
        return  # Told by ``island_problems``.
    if rule.kind in ("onebit", "dgc"):
        yield (
            f"compress={plan.compress} is a rule for gradients, and islands with sync={plan.sync} send changes of weights; use "
            f"compress=int8 or compress=topk:0.01"
        )
    if sync.kind == "gossip":
        if sync.graph in ("exponential", "random"):
            yield (
                f"compress={plan.compress} remembers what neighbours were told, and those of sync={plan.sync} change; use "
                f"sync=gossip:ring, or leave compress out"
            )
        if rule.kind not in ("fp16", "bf16", "fp8", "int8", "int4", "sign", "topk"):
            yield f"compress={plan.compress} does not go with sync={plan.sync}; use compress=int8 or compress=topk:0.1"
    if sync.kind in ("easgd", "pushsum", "sparse"):
        yield (
            f"compress={plan.compress} is for the mean change of local, diloco, slowmo and stream, and sync={plan.sync} takes "
            f"none; leave compress out, or use sync=diloco:{sync.period}"
        )
    if plan.zero and sync.kind == "gossip":
        yield (
            f"compress={plan.compress} with sync={plan.sync} does not go with zero={plan.zero} inside: its messages are of whole "
            f"tensors; leave compress or zero out, or use sync=diloco:50"
        )
    elif plan.zero and rule.kind in ("powersgd", "topk", "randk"):
        yield (
            f"compress={plan.compress} between islands does not go with zero={plan.zero} inside: it is a rule for whole tensors, "
            f"and zero gives ranks some of their rows; use compress=int8 or compress=int4, or leave zero out"
        )


def _onebit_problems(plan: PlanKeys, rule: CompressRule) -> Iterator[str]:
    if rule.start < 1:
        yield (
            f"compress={plan.compress} freezes the variance of adam at its first compressed step, and at step {rule.start} there "
            f"is none; write onebit@S with the steps of the warm-up, such as compress=onebit@100"
        )
    if plan.zero:
        yield (
            f"compress={plan.compress} does not go with zero={plan.zero}: every replica moves the whole momentum with its own "
            f"gradient, and zero shards it; leave zero out, or use compress=int8"
        )


_BY_MOMENTS = ("adam", "adamw", "adamax", "nadam", "radam", "adagrad", "rmsprop", "lamb")
"""Optimizers that divide by a moment of the gradient, as they are called in recipes and, in lower case, in torch."""


def costly_ways(plan: PlanKeys, optimizer: str) -> Iterator[str]:
    """What to warn of in a plan that is right, and costs more than it brings: in a recipe and in a script alike.

    Args:
        plan: with its degrees.
        optimizer: its name, or its class.
    """
    name = optimizer.rpartition(".")[2]
    rule = None if plan.compress is None else CompressRule.parse(plan.compress)
    # Measured of sums of gradients; islands send changes of weights, and a ratio of 1 leaves nothing out.
    if rule is not None and plan.sync == "allreduce" and name.lower() in _BY_MOMENTS:
        if rule.kind in COSTLY and not (rule.kind in ("topk", "dgc") and rule.number == 1):
            yield (
                f"compress={plan.compress} under {name} is about as good as one replica alone at equal steps; measured in "
                f"benchmarks/replicas_loss"
            )
        elif rule.kind == "powersgd" and rule.number == 1:
            yield (
                f"compress={plan.compress} under {name} is hardly better than one replica alone at equal steps, and powersgd:8 "
                f"close to a dense sum; measured in benchmarks/replicas_loss"
            )
    sync, count = SyncRule.parse(plan.sync), plan.islands if plan.islands > 1 else plan.dp or 1
    sent = {"ring": min(2, count - 1), "complete": count - 1}.get(sync.graph or "", 0)
    dense = 2 * (count - 1) / count
    if plan.compress is None and sync.period == 1 and sent > dense:
        yield (
            f"sync={sync} sends {sent} models from each of {count} islands at every step, and a dense sum {dense:.3g}; "
            f"sync={sync.kind}:exponential sends one, and sync={sync},10 a tenth"
        )
