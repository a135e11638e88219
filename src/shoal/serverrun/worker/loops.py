"""The loops of a worker other than the plain one (``process.py``): with overlap, batches of L-BFGS, local steps, and Downpour.

With overlap a worker pushes and pulls while it computes, under rules that allow weights which are not the newest:

    compute p      | push p-1, commit it, pull what there is then
    compute p+1    | push p, commit it, pull            with the weights that were pulled beside p: p itself is not in them
    nothing left   | push p+1, commit it                nobody would read what a pull brought

What a work unit needs (the rule's bound, the worker's own updates that are made) is in the weights that it reads, or they are
pulled once more and waited for. What was read is told with the gradient, as everywhere.
"""

from concurrent.futures import Future

import torch

from shoal.optim.rates import rate
from shoal.paramserver.records import PushRecord, Read, WorkUnit
from shoal.paramserver.worker.own_steps import DownpourSettings, DownpourWorker, LocalSettings, Push, train_locally
from shoal.serverrun.process import ProcessSpec
from shoal.serverrun.worker.connection import Computed, ServerConnection, Worker, describe
from shoal.serverrun.worker.shares import ShareResult


def run_overlapped_loop(connection: ServerConnection, worker: Worker, spec: ProcessSpec) -> None:
    """Work units, one after the other, with everything that crosses the wire beside them.

    Raises:
        RunOver: the run ended meanwhile.
        Evicted: others do what this worker was doing.
    """
    flat = worker.flat
    handed_in: Future[bool] | None = None
    gradient = torch.empty_like(flat.gradient)
    read: Read | None = None
    asked = connection.ask()
    while (unit := connection.given(asked)) is not None:
        pulling: Future[Read] | None = None
        if read is None or not connection.client.is_enough(read, unit.need, unit.bound):
            connection.settle(handed_in)
            read = connection.pull(unit.need, unit.bound)
            flat.weights.copy_(connection.landing)
        else:
            connection.use(read)
            # Begun only now that there is a work unit to be computed beside it: the last gradient of a run has none after it.
            pulling = None if handed_in is None else connection.pull_after(handed_in)
        computed = worker.compute(unit)
        pulled = connection.pulled(pulling) if pulling is not None else None
        if pulled is not None:
            # Before the next ones land there.
            flat.weights.copy_(connection.landing)
        push = describe(connection.identity, unit, computed, read=read, waited=0.0)
        # Asked before the work unit is handed in, so that it is answered by what was made until here: were the commit there
        # first, its own update would be needed, and the weights that were pulled beside it would have been pulled for nothing.
        # Until the commit is answered it is in this worker's hands, or the update log would take it for lost and give it again.
        asked = connection.ask(push.units)
        handed_in = connection.hand_in(gradient.copy_(computed.gradient), push, read)
        # Where nothing was under way the same weights serve once more, and from then on something is.
        read = read if pulled is None else pulled
    connection.settle(handed_in)


# A worker under L-BFGS: small work units of one large batch, one after the other, for whoever drives.
#
# It pulls the weights once for each evaluation. If the evaluation ends before it is done, because another was faster with the
# same work unit, the shards pass its gradient over.


def run_batch_loop(connection: ServerConnection, worker: Worker, spec: ProcessSpec) -> None:
    """Work units of batches until the last step is done.

    Raises:
        RunOver: the run ended meanwhile.
        Evicted: others do what this worker was doing.
    """
    done: tuple[int, int, float] | None = None
    evaluation = -1
    while (given := connection.draw(worker.shares.num_samples, done)) is not None:
        if given.evaluation != evaluation:
            connection.pull_now()
            evaluation = given.evaluation
        loss = worker.run_span(given.step, given.start, given.stop)
        connection.add_part(worker.flat.collect_gradient(), evaluation, given.unit, loss)
        done = (evaluation, given.unit, loss)


# A worker that takes several steps of its own for each work unit, and pushes one direction (FedNova,
# ``paramserver/worker/own_steps.py``).
#
# A work unit stays what it is everywhere: one share of one step's samples, each sample once. A worker with tau local steps cuts
# it into tau parts and takes one step on each, so a worker with more steps has smaller batches; it begins from the servers'
# weights. What a work unit comes to therefore depends on who did it, unlike everywhere else: give all workers the same
# ``local_steps`` where a death must change no bit.


class LocalSteps:
    """Computes work units by local steps.

    Args:
        connection: lands the servers' weights beside the model's.
        worker: what computes.
        spec: whose settings.
    """

    def __init__(self, connection: ServerConnection, worker: Worker, spec: ProcessSpec) -> None:
        config = spec.recipe.paramserver
        self._connection, self._worker, self._optim = connection, worker, spec.recipe.optim
        self._steps = config.own_steps(spec.index)
        self._own_rate = config.own_rate(spec.index)

    def __call__(self, unit: WorkUnit) -> Computed:
        """This worker's direction for a work unit.

        Raises:
            RunError: the steps led out of the finite numbers.
        """
        results: list[ShareResult] = []
        flat = self._worker.flat

        def gradient_at(weights: torch.Tensor, step: int) -> torch.Tensor:
            flat.weights.copy_(weights)
            with torch.enable_grad():
                results.append(self._worker.run(unit, part=step, num_parts=self._steps))
            return flat.collect_gradient()

        lr = self._own_rate or rate(self._optim, unit.step, self._worker.total_steps)
        found = train_locally(self._connection.landing, gradient_at, LocalSettings(steps=self._steps, lr=lr))
        return Computed(result=ShareResult.joined(results), gradient=found.direction, steps=found.steps)


# A worker under Downpour: steps of its own between fetches, what it gathered pushed every so often.
#
# The rule itself is ``paramserver/worker/own_steps.py``; here it meets the update log, the model and the wire. A step is a work
# unit: the worker keeps the work units whose gradients it has added up, and hands all of them in with one push.


class Gathered:
    """The work units that a gathered is made of, as long as it grows."""

    def __init__(self) -> None:
        self._done: list[tuple[WorkUnit, ShareResult]] = []

    def add(self, unit: WorkUnit, result: ShareResult) -> None:
        """One more is computed."""
        self._done.append((unit, result))

    @property
    def units(self) -> tuple[int, ...]:
        """Their numbers, in order."""
        return tuple(sorted(unit.number for unit, _ in self._done))

    def describe(self, worker: str, gathered: Push) -> PushRecord:
        """What the update log is told of the gathered; the next one begins empty."""
        assert gathered.num_gradients == len(self._done), "a gathered has the gradients of the work units that are held"
        results = [result for _, result in self._done]
        rows = tuple(result.rows for _, result in sorted(self._done, key=lambda done: done[0].number))
        weight = sum(result.weight for result in results)
        push = PushRecord(
            worker=worker,
            number=0,
            units=self.units,
            samples=sum(result.samples for result in results),
            weight=weight,
            loss=sum(result.mean_loss * result.weight for result in results) / weight if weight else 0.0,
            version=gathered.version,
            rows=rows,
        )
        self._done = []
        return push


class Downpour:
    """One worker's work under one name.

    Args:
        connection: lands what it fetches beside the model's weights, not in them.
        worker: what computes.
        place: rule and recipe.
    """

    def __init__(self, connection: ServerConnection, worker: Worker, spec: ProcessSpec) -> None:
        rule, recipe = spec.rule, spec.recipe
        self._connection, self._worker, self._optim = connection, worker, recipe.optim
        self._own_rate = recipe.paramserver.own_rate(spec.index)
        settings = DownpourSettings(push_every=rule.push_every, fetch_every=rule.fetch_every, lr=recipe.optim.lr)
        self._rule = DownpourWorker(worker.flat.weights, settings)
        self._overlap = recipe.paramserver.overlap
        self._gathered = Gathered()
        self._pushing: Future[bool] | None = None
        self._pushed: tuple[int, ...] = ()
        self._fetching: Future[None] | None = None

    def run(self) -> None:
        """Until there is nothing left to do."""
        while True:
            unit = self._connection.take(self._gathered.units + self._pushed)
            if unit is not None:
                self._step(unit)
                continue
            # The end of the run, or the update log wants what is held before it gives more.
            gathered = self._rule.flush()
            if gathered is None and self._pushing is None:
                return
            self._send(gathered)
            self._wait_for_push()

    def _step(self, unit: WorkUnit) -> None:
        if self._rule.wants_fetch:
            self._fetch(unit)
        self._rule.begin_step()
        result = self._worker.run(unit)
        lr = self._own_rate or rate(self._optim, unit.step, self._worker.total_steps)
        self._gathered.add(unit, result)
        self._send(self._rule.end_step(self._worker.flat.collect_gradient(), lr))

    def _fetch(self, unit: WorkUnit) -> None:
        is_first = self._fetching is None
        if self._fetching is not None:
            # One at a time: they land in one place. What it brought is taken up by the step that begins now.
            self._connection.pulled(self._fetching)
        self._fetching = self._connection.fetch(unit, self._rule.land)
        if is_first or not self._overlap:
            self._connection.pulled(self._fetching)

    def _send(self, gathered: Push | None) -> None:
        if gathered is None:
            return
        self._wait_for_push()
        push = self._gathered.describe(self._connection.identity, gathered)
        self._pushing = self._connection.hand_in(gathered.gradient, push, gathered.read)
        self._pushed = push.units
        if not self._overlap:
            self._wait_for_push()

    def _wait_for_push(self) -> None:
        self._connection.settle(self._pushing)
        self._pushing, self._pushed = None, ()


def run_downpour_loop(connection: ServerConnection, worker: Worker, spec: ProcessSpec) -> None:
    """Work units by the rule of Downpour.

    Raises:
        RunOver: the run ended meanwhile.
        Evicted: others do what this worker was doing.
    """
    Downpour(connection, worker, spec).run()
