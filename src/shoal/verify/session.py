"""A whole verification, from a request to its certificate; what the command line calls."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from shoal.core.errors import RequestError
from shoal.core.plan import Plan
from shoal.trainer.config import Recipe, RecipeLike, name_recipe, read_recipe
from shoal.verify.certificate import Certificate, MutantResult
from shoal.verify.elastic.proof import prove_elastic
from shoal.verify.elastic.script import parse_script
from shoal.verify.exclusive import check_exclusive
from shoal.verify.mutants.catalogue import MUTANTS, PREDICTION, own_recipe, with_overrides
from shoal.verify.mutants.mutant import Mutant
from shoal.verify.proof import Prover, hash_recipe
from shoal.verify.request import DEFAULT_STEPS, Subject, build_subject, check_plan, choose_precisions, prepare_verify
from shoal.verify.result import PlanResult, refused, settle

Log = Callable[[str], None]
Save = Callable[[Certificate], None]
"""Called with all that is known so far, after every proof."""
# Ranks may outnumber the cores; with one thread each, no plan computes in other pieces than the reference.
_THREADS = 1


def verify(
    recipe: RecipeLike,
    plans: str | Plan | Sequence[str | Plan] = (),
    *,
    all_plans: bool = False,
    mutants: bool = False,
    nproc: int | None = None,
    steps: int = DEFAULT_STEPS,
    dtype: str | None = None,
    overrides: Sequence[str] = (),
    elastic: str | None = None,
    log: Log = lambda line: None,
    save: Save = lambda certificate: None,
) -> Certificate:
    """Prove that plans compute what one process computes, as ``shoal verify`` does; processes are started for it.

    Every loss, gradient, norm, weight and optimizer state is compared over some steps. A plan that differs raises nothing:
    ``certificate.ok`` says whether everything that was asked is proved, ``certificate.plans`` has a result for each plan.

    Args:
        recipe: the path of a recipe, its tables as a dict, or a ``Recipe``.
        plans: what to prove, such as ``"dp=2"`` or ``["dp=2", "dp=2 zero=3"]``; the recipe's own plan when there is none.
        all_plans: prove every plan that fits.
        mutants: plant bugs in the ranks, and show that each is caught.
        nproc: processes of each plan.
        steps: to compare.
        dtype: ``float64``, ``float32``, ``bfloat16`` or ``float16`` for all plans; left out, the recipe's, and float64 too
            where sums are split.
        overrides: ``section.key=value`` for the recipe, as ``--set`` has them.
        elastic: how many replicas are present, such as ``4,3,1,4``: each plan is also run under ``elastic.mode = "shrink"`` with
            replicas that die like that, and must end in the bits of the plan left alone.
        log: called with each line for people.
        save: called with all that is known so far, after every proof.

    Returns:
        The certificate; ``certificate.as_values()`` is what ``--json`` writes.

    Raises:
        RequestError: the request is wrong, or none of its plans can be proved; nothing was started.
    """
    plans = [plans] if isinstance(plans, str | Plan) else plans
    if steps < 1:
        raise RequestError(f"steps={steps} compares nothing; give at least 1")
    check_exclusive(has_plans=bool(plans), all_plans=all_plans, mutants=mutants, nproc=nproc, dtype=dtype)
    if mutants:
        return verify_mutants(recipe, steps=steps, overrides=overrides, log=log, save=save)
    return verify_plans(
        recipe,
        plans=[str(plan) for plan in plans],
        takes_all=all_plans,
        num_processes=nproc,
        steps=steps,
        precision=dtype,
        overrides=overrides,
        elastic=elastic,
        log=log,
        save=save,
    )


def verify_plans(
    given: RecipeLike,
    *,
    plans: Sequence[str],
    takes_all: bool,
    num_processes: int | None,
    steps: int,
    precision: str | None,
    overrides: Sequence[str],
    log: Log,
    save: Save,
    elastic: str | None = None,
) -> Certificate:
    """Prove plans. Every one has a result: one that cannot run, or that fails, takes none of the others with it.

    Raises:
        RequestError: the request is wrong; nothing was started.
    """
    started = time.monotonic()
    request = prepare_verify(
        given,
        plans=plans,
        takes_all=takes_all,
        num_processes=num_processes,
        precision=precision,
        overrides=overrides,
    )
    recipe = request.subject.recipe
    if elastic is not None:
        # Before the first proof, which takes its time.
        for proposal in request.proposals:
            parse_script(elastic, dp=proposal.plan.dp or 1)
    threads = recipe.train.threads or _THREADS
    certificate = _begin(given, recipe, steps=steps, threads=threads, overrides=overrides)
    certificate = replace(
        certificate, takes_all=takes_all, model_hash=request.model_hash, warnings=tuple(request.warnings)
    )
    for warning in request.warnings:
        log(warning)
    left_out = [refused(str(one.plan), dtype=one.precision, steps=steps, reason=one.reason) for one in request.refusals]
    for result in left_out:
        log(f"refused {result.plan}: {result.reason}")
    names = [f"{proposal.plan} in {proposal.precision}" for proposal in request.proposals]
    results: list[PlanResult] = []
    with Prover(steps=steps, threads=threads) as prover:
        for number, proposal in enumerate(request.proposals, start=1):
            log(f"[{number}/{len(names)}] {names[number - 1]}")
            results.append(prover.prove(request.subject, proposal.plan, proposal.precision))
            if not results[-1].ok:
                # Why it is refused is often the same for all plans, and said once, at the end.
                is_refused = results[-1].status == "refused"
                log(f"    {results[-1].status}" + ("" if is_refused else f": {results[-1].reason}"))
            certificate = replace(
                certificate,
                plans=(*settle(results), *left_out),
                pending=tuple(names[number:]),
                wall_s=time.monotonic() - started,
            )
            save(certificate)
    for plan in dict.fromkeys(str(proposal.plan) for proposal in request.proposals) if elastic else ():
        log(f"{plan} with {elastic} replicas")
        results.append(prove_elastic(recipe, Plan.parse(plan), str(elastic)))
        certificate = replace(
            certificate, plans=(*settle(results), *left_out), pending=(), wall_s=time.monotonic() - started
        )
        save(certificate)
    return certificate


def verify_mutants(given: RecipeLike, *, steps: int, overrides: Sequence[str], log: Log, save: Save) -> Certificate:
    """Plant every bug in turn and see which comparison catches it; each has a control without the bug.

    Raises:
        RequestError: the recipe is wrong; nothing was started.
    """
    started = time.monotonic()
    recipe = read_recipe(given, overrides)
    results: list[MutantResult] = []
    controls: dict[str, PlanResult] = {}
    # Some bugs show in the second step at the earliest.
    steps, threads = max(steps, DEFAULT_STEPS), recipe.train.threads or _THREADS
    certificate = _begin(given, recipe, steps=steps, threads=threads, overrides=overrides)
    with Prover(steps=steps, threads=threads) as prover:
        ordered = sorted(MUTANTS.values(), key=lambda mutant: Plan.parse(mutant.plan).world_size)
        for number, mutant in enumerate(ordered, start=1):
            log(f"[{number}/{len(ordered)}] {mutant.name} under {mutant.plan}")
            results.append(try_mutant(prover, mutant, recipe, controls))
            certificate = replace(
                certificate,
                mutants=tuple(results),
                pending=tuple(one.name for one in ordered[number:]),
                wall_s=time.monotonic() - started,
            )
            save(certificate)
    return certificate


def _begin(given: RecipeLike, recipe: Recipe, *, steps: int, threads: int, overrides: Sequence[str]) -> Certificate:
    return Certificate(
        recipe=name_recipe(given),
        recipe_hash=hash_recipe(recipe),
        settings=tuple(overrides),
        steps=steps,
        seed=recipe.train.seed,
        threads=threads,
    )


def _mutant_subject(mutant: Mutant, plan: Plan, recipe: Recipe) -> Subject:
    """The user's recipe with what the bug needs, where the plan can run it; a small recipe of our own elsewhere."""
    own = own_recipe(mutant)
    if mutant.model is None and recipe.model.__class__ is own.model.__class__:
        try:
            subject = build_subject(with_overrides(recipe, mutant))
            check_plan(subject, plan)
            choose_precisions(plan, mutant.precision, subject.recipe.optim)
        except RequestError:
            pass
        else:
            return subject
    subject = build_subject(own)
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
    by, detail = _seen(found)
    # What a prediction is to catch is caught only where the prediction holds without it.
    is_clean = control.ok and (control.prediction.ok is not False or mutant.by != PREDICTION)
    return MutantResult(
        name=mutant.name,
        plan=mutant.plan,
        dtype=mutant.precision,
        caught=by in mutant.by.split(" or "),
        by=by,
        expected=mutant.by,
        control_ok=is_clean,
        detail=detail if is_clean else f"control: {_seen(control)[1]}; {detail}",
    )


def _seen(result: PlanResult) -> tuple[str | None, str]:
    """The comparison that saw something first, numbers before predictions, and what it saw."""
    if result.first_difference is not None:
        return result.first_difference.kind, str(result.first_difference)
    if not result.ok:
        return None, result.reason
    if result.prediction.off:
        return PREDICTION, "; ".join(map(str, result.prediction.off))
    return None, "nothing differs"
