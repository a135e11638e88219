"""A worker that pushes and pulls while it computes, under rules that allow weights which are not the newest.

    compute p      | push p-1, commit it, pull what there is then
    compute p+1    | push p, commit it, pull            with the weights that were pulled beside p: p itself is not in them
    nothing left   | push p+1, commit it                nobody would read what a pull brought

What a portion needs (the rule's bound, the worker's own updates that are made) is in the weights that it reads, or they are
pulled once more and waited for. What was read is told with the gradient, as everywhere.
"""

from concurrent.futures import Future

import torch

from shoal.core.updates import UpdateRule
from shoal.paramserver.config import ParamServerConfig
from shoal.paramserver.rounds import Read
from shoal.serverrun.member import MemberPlace
from shoal.serverrun.workline import Line, Worker, describe


def pulls_ahead(config: ParamServerConfig, rule: UpdateRule) -> bool:
    """Whether this way of working is asked for and has something to give.

    Not where a step reads the step before (``bsp``, ``ssp:0``), nor under ``half``, where a worker waits for its own round: what
    was pulled before is never enough there. Nor with local steps, which begin and end at the weights that were pulled.
    """
    return config.overlap and not config.local_steps and rule.kind in ("async", "ssp") and rule.staleness != 0


def work_ahead(line: Line, worker: Worker, place: MemberPlace) -> None:
    """Portions, one after the other, with everything that crosses the wire beside them.

    Raises:
        RunOver: the run ended meanwhile.
        Evicted: others do what this worker was doing.
    """
    flat = worker.flat
    handed_in: Future[bool] | None = None
    gradient = torch.empty_like(flat.gradient)
    read: Read | None = None
    asked = line.ask()
    while (portion := line.given(asked)) is not None:
        pulling: Future[Read] | None = None
        if read is None or not line.client.is_enough(read, portion.need, portion.bound):
            if handed_in is not None:
                handed_in.result()
            read = line.pull(portion.need, portion.bound)
            flat.weights.copy_(line.landing)
        else:
            line.use(read)
            # Begun only now that there is a portion to be computed beside it: the last gradient of a run has none after it.
            pulling = None if handed_in is None else line.pull_after(handed_in)
        computed = worker.compute(portion)
        pulled = pulling.result() if pulling is not None else None
        if pulled is not None:
            # Before the next ones land there.
            flat.weights.copy_(line.landing)
        contribution = describe(line.identity, portion, computed, read=read, waited=0.0)
        # Asked before the portion is handed in, so that it is answered by what was made until here: were the commit there first,
        # its own update would be needed, and the weights that were pulled beside it would have been pulled for nothing. Until the
        # commit is answered it is in this worker's hands, or the book would take it for lost and give it again.
        asked = line.ask(contribution.portions)
        handed_in = line.hand_in(gradient.copy_(computed.gradient), contribution, read)
        # Where nothing was under way the same weights serve once more, and from then on something is.
        read = read if pulled is None else pulled
    if handed_in is not None:
        handed_in.result()
