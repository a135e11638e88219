"""Which plans may be picked for a recipe: the synchronous ones that its model, its batch and the number of processes allow."""

from shoal.core.errors import RequestError
from shoal.core.pipelines import schedule_facts
from shoal.core.plan import Plan, all_plans
from shoal.engine.resolve import check_samples, check_settings, resolve_plan
from shoal.models.check import facts_of
from shoal.parallel.requirements import describe_facts
from shoal.tuning.rehearsal import Subject


def legal_plans(subject: Subject, num_processes: int) -> list[Plan]:
    """The synchronous plans over so many processes that the model and the recipe allow, derived; plain ones first."""
    recipe = subject.recipe
    facts = describe_facts(subject.analysis, subject.model)
    # A run is checked by what the recipe says of a model of ours: a single head is not seen by looking.
    said = facts_of(recipe.model, subject.data.spec)
    found: list[Plan] = []
    for plan in all_plans(num_processes, facts):
        if plan.recompute != "none" or (plan.pp > 1 and schedule_facts(plan.schedule).is_asynchronous):
            continue
        if said is not None and plan.problems(said):
            continue
        try:
            check_settings(recipe.train, plan)
            check_samples(num_samples=len(subject.data.train), replicas=plan.num_shares)
            derived = resolve_plan(recipe.train, plan).plan
        except RequestError:
            continue
        if derived not in found:
            found.append(derived)
    return found
