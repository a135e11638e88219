"""The proof of a plan with parameter servers: run, held against its rule, then compared with one process.

The run comes first: under most rules only its log says what one process has to compute. Where every read is of the newest
weights (``bsp``, ``ssp:0``, one worker) the log decides nothing, and the reference is that of ``dp`` with as many replicas.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from shoal.core.updaterule import UpdateRule
from shoal.data.order import position_of, take
from shoal.verify.compare.judge import judge_run
from shoal.verify.compare.tolerance import derive_tolerance, flat_bound
from shoal.verify.reference.case import Case, Tree, UpdateLog
from shoal.verify.reference.recording import Recording
from shoal.verify.request import ProofRequest
from shoal.verify.result import PlanResult, broke_rule, compared
from shoal.verify.servers.rules import Promise, find_violation
from shoal.verify.servers.run import ServerRun, run_servers


def prove_servers(
    request: ProofRequest,
    folder: Path,
    *,
    reference: Callable[[Case, Tree], Path],
    replay: Callable[[Case, UpdateLog], Path],
    threads: int,
    deadline_seconds: float,
) -> PlanResult:
    """Run a plan and compare it.

    Args:
        request: the plan.
        folder: for the run and its recordings; empty.
        reference: trains in one process by a tree of sums; where it recorded that.
        replay: makes the updates of a log in one process; where it recorded that.
        threads: compute threads of each process.
        deadline_seconds: after which the run has failed.

    Raises:
        RequestError: the reference refuses the model.
        RunError: the run did not come to its end.
    """
    plan, case, promise = request.plan, request.case, promise_of(request)
    run = run_servers(
        request.recipe,
        plan,
        steps=case.steps,
        mutant=request.mutant,
        deaths=request.deaths,
        folder=folder,
        threads=threads,
        deadline_seconds=deadline_seconds,
    )
    broken = find_violation(promise, run.updates, count_samples(request))
    if broken is not None:
        return broke_rule(request, broken)
    # What a codec makes of a push is the replay's to say, under every rule.
    is_plain = promise.is_plain and plan.compress is None
    if is_plain:
        recording = Recording.open(reference(case, request.tree), "reference")
    else:
        recording = Recording.open(replay(case, _log_of(request, promise, run)), "reference")
    narrow = recording.facts.get("narrow", ())
    tolerance = derive_tolerance(
        plan,
        precision=case.precision,
        depth=max(1, request.subject.facts.num_blocks),
        adds_in_order=True,
        joins_replicas=False,
        optim=request.recipe.optim,
        total_steps=case.total_steps,
        steps=len(run.updates),
        narrow=narrow,
    )
    bound = flat_bound(case.precision, tolerance, narrow)
    judged = judge_run(recording, run.gather, tolerance=tolerance, layout=run.layout(plan), flat_bound=bound)
    reason = tolerance.reason
    if not is_plain:
        allowed = "every bit" if tolerance.is_bitwise else tolerance.reason
        reason = f"{run.describe()}, replayed by the rule: {allowed}"
    return compared(request, judged, tolerance, reason=reason, flat=recording.facts["flat"])


def promise_of(request: ProofRequest) -> Promise:
    """The update rule of the plan in plain numbers."""
    shares, config = request.plan.num_shares, request.recipe.paramserver
    rule = UpdateRule.parse(request.plan.update or "bsp").resolve(shares)
    return Promise(
        name=str(rule),
        shares=shares,
        steps=request.case.steps,
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


def count_samples(request: ProofRequest) -> dict[int, int]:
    """How many samples each work unit has; the last batch of an epoch is short."""
    shares, microbatches = request.plan.num_shares, request.plan.microbatches or 1
    count, batch = request.subject.num_samples, request.case.global_batch
    found = {}
    for step in range(request.case.steps):
        taken, _ = take(position_of(step, count, batch), count, batch)
        cuts = np.array_split(np.arange(taken.start, taken.stop), shares * microbatches)
        for share in range(shares):
            found[step * shares + share] = sum(map(len, cuts[share * microbatches : (share + 1) * microbatches]))
    return found


def _log_of(request: ProofRequest, promise: Promise, run: ServerRun) -> UpdateLog:
    return UpdateLog(
        tree=request.tree,
        adds_to_steps=promise.quorum is None,
        total_updates=promise.total_updates(request.case.total_steps),
        takes_own_steps=UpdateRule.parse(promise.name).kind == "downpour",
        own_rates=request.recipe.paramserver.local_lr,
        pieces=run.pieces,
        updates=[update.as_values() for update in run.updates],
        compress=request.plan.compress,
        compression={} if request.plan.compress is None else request.recipe.compression.model_dump(mode="json"),
    )
