"""A whole verification, from a request to its certificate; what the command line calls."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from shoal.core.errors import RequestError
from shoal.core.plan import Plan
from shoal.trainer.config import Recipe, load_recipe
from shoal.verify.certificate import Certificate, MutantResult
from shoal.verify.mutants import MUTANTS, Mutant, own_recipe, with_overrides
from shoal.verify.proof import Prover, hash_recipe
from shoal.verify.question import Subject
from shoal.verify.request import DEFAULT_STEPS, build_subject, check_plan, choose_precisions, prepare_verify
from shoal.verify.result import PlanResult

Tell = Callable[[str], None]
# Ranks may outnumber the cores; with one thread each, no plan computes in other pieces than the reference.
_THREADS = 1


def verify_plans(
    path: Path,
    *,
    plans: Sequence[str],
    takes_all: bool,
    num_processes: int | None,
    steps: int,
    precision: str | None,
    overrides: Sequence[str],
    tell: Tell,
) -> Certificate:
    """Prove plans.

    Raises:
        RequestError: the request is wrong; nothing was started.
    """
    started = time.monotonic()
    request = prepare_verify(
        path,
        plans=plans,
        takes_all=takes_all,
        num_processes=num_processes,
        precision=precision,
        overrides=overrides,
    )
    recipe = request.subject.recipe
    threads = recipe.train.threads or _THREADS
    for remark in request.remarks:
        tell(remark)
    results: list[PlanResult] = []
    with Prover(steps=steps, threads=threads) as prover:
        for number, proposal in enumerate(request.proposals, start=1):
            tell(f"[{number}/{len(request.proposals)}] {proposal.plan} in {proposal.precision}")
            results.append(prover.prove(request.subject, proposal.plan, proposal.precision))
            if not results[-1].ok:
                tell(f"    {results[-1].first_difference}")
    return Certificate(
        plans=tuple(results),
        recipe=str(path),
        recipe_hash=hash_recipe(recipe),
        settings=tuple(overrides),
        steps=steps,
        model_hash=request.model_hash,
        seed=recipe.train.seed,
        threads=threads,
        wall_s=time.monotonic() - started,
        remarks=request.remarks,
    )


def verify_mutants(path: Path, *, steps: int, overrides: Sequence[str], tell: Tell) -> Certificate:
    """Plant every bug in turn and see which comparison catches it; each has a control without the bug.

    Raises:
        RequestError: the recipe is wrong; nothing was started.
    """
    started = time.monotonic()
    recipe = load_recipe(path, overrides)
    results: list[MutantResult] = []
    controls: dict[str, PlanResult] = {}
    # Some bugs show in the second step at the earliest.
    steps = max(steps, DEFAULT_STEPS)
    with Prover(steps=steps, threads=recipe.train.threads or _THREADS) as prover:
        ordered = sorted(MUTANTS.values(), key=lambda mutant: Plan.parse(mutant.plan).world_size)
        for number, mutant in enumerate(ordered, start=1):
            tell(f"[{number}/{len(ordered)}] {mutant.name} under {mutant.plan}")
            results.append(try_mutant(prover, mutant, recipe, controls))
    return Certificate(
        mutants=tuple(results),
        recipe=str(path),
        recipe_hash=hash_recipe(recipe),
        settings=tuple(overrides),
        steps=steps,
        model_hash="",
        seed=recipe.train.seed,
        threads=recipe.train.threads or _THREADS,
        wall_s=time.monotonic() - started,
    )


def _mutant_subject(mutant: Mutant, plan: Plan, recipe: Recipe) -> Subject:
    """The user's recipe with what the bug needs, where the plan can run it; a small recipe of our own elsewhere."""
    own = own_recipe(mutant)
    if mutant.model is None and recipe.model.__class__ is own.model.__class__:
        try:
            subject, _ = build_subject(with_overrides(recipe, mutant))
            check_plan(subject, plan)
            choose_precisions(plan, mutant.precision, subject.recipe.optim)
        except RequestError:
            pass
        else:
            return subject
    subject, _ = build_subject(own)
    check_plan(subject, plan)
    return subject


def try_mutant(prover: Prover, mutant: Mutant, recipe: Recipe, controls: dict[str, PlanResult]) -> MutantResult:
    """Run one bug and its control; controls that were run before are in ``controls`` and are not run again."""
    plan = Plan.parse(mutant.plan)
    subject = _mutant_subject(mutant, plan, recipe)
    key = f"{hash_recipe(subject.recipe)} {plan} {mutant.precision} {mutant.deaths}"
    if key not in controls:
        controls[key] = prover.prove(subject, plan, mutant.precision, deaths=mutant.deaths)
    control = controls[key]
    found = prover.prove(subject, plan, mutant.precision, mutant=mutant.name, deaths=mutant.deaths)
    by = found.first_difference.kind if found.first_difference is not None else None
    detail = str(found.first_difference) if found.first_difference is not None else "nothing differs"
    return MutantResult(
        name=mutant.name,
        plan=mutant.plan,
        dtype=mutant.precision,
        caught=by in mutant.by,
        by=by,
        expected=" or ".join(mutant.by),
        control_ok=control.ok,
        detail=detail if control.ok else f"control: {control.first_difference}; {detail}",
    )
