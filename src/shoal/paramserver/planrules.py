"""What must be right in a plan with parameter servers, whatever the model: pure functions that return what is wrong."""

from collections.abc import Iterator

from shoal.core.errors import RequestError
from shoal.core.pipelines import schedule_facts
from shoal.core.plan import Plan, plan_rule
from shoal.paramserver.updaterule import UpdateRule


@plan_rule
def server_problems(plan: Plan) -> Iterator[str]:
    """What is wrong with the servers, workers, update rule and backups of a plan."""
    if plan.ps == 0:
        for key in ("workers", "update"):
            if getattr(plan, key) is not None:
                yield f"{key}={getattr(plan, key)} is of parameter servers, and ps is 0; set ps to 1 or more, or leave {key} out"
        if plan.backup:
            yield f"backup={plan.backup} is of parameter servers, and ps is 0; set ps to 2 or more, or leave backup out"
        return
    if plan.backup > 1:
        yield f"backup={plan.backup} is not there yet: a shard has one backup or none; set backup to 1"
    elif plan.backup >= plan.ps:
        yield (
            f"backup={plan.backup} needs {plan.backup + 1} servers, and ps is {plan.ps}: a backup beside its primary would die "
            f"with it; set ps to {plan.backup + 1} or more, or backup to {plan.ps - 1}"
        )
    if plan.workers is not None and plan.workers < 1:
        yield f"workers={plan.workers} is below 1; set workers to 1 or more"
    yield from _grid_problems(plan)
    try:
        rule = UpdateRule.parse(plan.update or "bsp")
    except RequestError as error:
        yield str(error)
        return
    if rule.kind == "half" and plan.workers is not None and rule.quorum is not None and rule.quorum > plan.workers:
        yield (
            f"update={plan.update} closes an update at {rule.quorum} arrivals, and there are {plan.workers} workers; "
            f"lower it to {plan.workers}"
        )


def _grid_problems(plan: Plan) -> Iterator[str]:
    """A worker is a group of ranks that computes one gradient; replicas, and whoever updates weights, are the servers' affair."""
    if plan.dp is not None and plan.dp > 1:
        yield f"dp={plan.dp} does not go with ps={plan.ps}: its replicas are the workers; set workers={plan.dp} and leave dp out"
    if plan.zero:
        yield f"zero={plan.zero} does not go with ps={plan.ps}: the servers have the optimizer state already; leave zero out"
    if plan.pp > 1 and schedule_facts(plan.schedule).is_asynchronous:
        yield (
            f"schedule={plan.schedule} does not go with ps={plan.ps}: its stages update weights by themselves, and here the "
            f"servers do; use schedule=1f1b"
        )
