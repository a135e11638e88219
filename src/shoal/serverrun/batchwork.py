"""A worker under L-BFGS: small portions of one large batch, one after the other, for whoever drives.

It pulls the weights once for each evaluation. If the evaluation ends before it is done, because another was faster with the same
portion, the shards pass its gradient over.
"""

from shoal.serverrun.member import MemberPlace
from shoal.serverrun.workline import Line, Worker


def work_batches(line: Line, worker: Worker, place: MemberPlace) -> None:
    """Portions of batches until the last step is done.

    Raises:
        RunOver: the run ended meanwhile.
        Evicted: others do what this worker was doing.
    """
    done: tuple[int, int, float] | None = None
    evaluation = -1
    while (given := line.draw(worker.shares.num_samples, done)) is not None:
        if given.evaluation != evaluation:
            line.pull_now()
            evaluation = given.evaluation
        loss = worker.shares.run_stretch(given.step, given.start, given.stop)
        line.add_part(worker.flat.collect_gradient(), evaluation, given.portion, loss)
        done = (evaluation, given.portion, loss)
