"""The proof of a plan with parameter servers: run, held against its rule, then compared with one process.

The run comes first: under most rules only its log says what one process has to compute. Where every read is of the newest
weights (``bsp``, ``ssp:0``, one worker) the log decides nothing, and the reference is that of ``dp`` with as many replicas.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from shoal.core.updates import UpdateRule
from shoal.data.order import position_of, take
from shoal.verify.capture import Recording
from shoal.verify.case import COARSE_FLAT_BOUND, FLAT_BOUNDS, Case, Log, Tree
from shoal.verify.judge import judge_run
from shoal.verify.question import Question
from shoal.verify.result import PlanResult, broke_rule, compared
from shoal.verify.rules import Promise, find_violation
from shoal.verify.servers import ServerRun, run_servers
from shoal.verify.tolerance import derive_tolerance


def prove_servers(
    question: Question,
    folder: Path,
    *,
    reference: Callable[[Case, Tree], Path],
    replay: Callable[[Case, Log], Path],
    threads: int,
    deadline_seconds: float,
) -> PlanResult:
    """Run a plan and compare it.

    Args:
        question: the plan.
        folder: for the run and its recordings; empty.
        reference: trains in one process by a tree of sums; where it recorded that.
        replay: makes the updates of a log in one process; where it recorded that.
        threads: compute threads of each process.
        deadline_seconds: after which the run has failed.

    Raises:
        RequestError: the reference refuses the model.
        RunError: the run did not come to its end.
    """
    plan, case, promise = question.plan, question.case, promise_of(question)
    run = run_servers(
        question.recipe,
        plan,
        steps=case.steps,
        mutant=question.mutant,
        deaths=question.deaths,
        folder=folder,
        threads=threads,
        deadline_seconds=deadline_seconds,
    )
    broken = find_violation(promise, run.updates, count_samples(question))
    if broken is not None:
        return broke_rule(question, broken)
    if promise.is_plain:
        recording = Recording.open(reference(case, question.tree), "reference")
    else:
        recording = Recording.open(replay(case, _log_of(question, promise, run)), "reference")
    tolerance = derive_tolerance(
        plan,
        precision=case.precision,
        depth=max(1, question.subject.facts.num_blocks),
        adds_in_order=True,
        joins_replicas=False,
        optim=question.recipe.optim,
        total_steps=case.total_steps,
        steps=len(run.updates),
    )
    flat_bound = FLAT_BOUNDS.get(case.precision, COARSE_FLAT_BOUND)
    judged = judge_run(recording, run.gather, tolerance=tolerance, layout=run.layout(plan), flat_bound=flat_bound)
    reason = tolerance.reason
    if not promise.is_plain:
        allowed = "every bit" if tolerance.is_bitwise else tolerance.reason
        reason = f"{run.describe()}, replayed by the rule: {allowed}"
    return compared(question, judged, tolerance, reason=reason, flat=recording.facts["flat"])


def promise_of(question: Question) -> Promise:
    """The update rule of the plan in plain numbers."""
    shares, config = question.plan.num_shares, question.recipe.paramserver
    rule = UpdateRule.parse(question.plan.update or "bsp").resolve(shares)
    return Promise(
        name=str(rule),
        shares=shares,
        steps=question.case.steps,
        staleness=rule.staleness,
        quorum=rule.quorum,
        may_be_short=rule.wait > 0,
        weighs=rule.kind == "half",
        divides_by_age=config.staleness_aware and not rule.is_stepwise and rule.kind != "half",
        drop_beyond=None if rule.is_stepwise else config.drop_beyond,
        overlaps=config.overlap,
        push_every=rule.push_every,
        fetch_every=rule.fetch_every,
    )


def count_samples(question: Question) -> dict[int, int]:
    """How many samples each portion has; the last batch of an epoch is short."""
    shares, microbatches = question.plan.num_shares, question.plan.microbatches or 1
    count, batch = question.subject.num_samples, question.case.global_batch
    found = {}
    for step in range(question.case.steps):
        taken, _ = take(position_of(step, count, batch), count, batch)
        cuts = np.array_split(np.arange(taken.start, taken.stop), shares * microbatches)
        for share in range(shares):
            found[step * shares + share] = sum(map(len, cuts[share * microbatches : (share + 1) * microbatches]))
    return found


def _log_of(question: Question, promise: Promise, run: ServerRun) -> Log:
    return Log(
        shares=promise.shares,
        microbatches=question.plan.microbatches or 1,
        directions=question.tree.directions,
        users=question.tree.users,
        uses=question.tree.uses,
        places=question.tree.places,
        units=question.tree.units,
        turns=question.tree.turns,
        adds_to_steps=promise.quorum is None,
        total_updates=promise.total_updates(question.case.total_steps),
        takes_own_steps=UpdateRule.parse(promise.name).kind == "downpour",
        own_rates=question.recipe.paramserver.local_lr,
        pieces=run.pieces,
        updates=[update.as_values() for update in run.updates],
    )
