"""A worker under Downpour: steps of its own between fetches, what it gathered pushed every so often.

The rule itself is ``paramserver/downpour.py``; here it meets the book, the model and the wire. A step is a portion: the worker
keeps the portions whose gradients it has added up, and hands all of them in with one push.
"""

from concurrent.futures import Future

from shoal.optim.rates import rate
from shoal.paramserver.answers import Portion
from shoal.paramserver.downpour import DownpourSettings, DownpourWorker, Push
from shoal.paramserver.rounds import Contribution
from shoal.serverrun.member import MemberPlace
from shoal.serverrun.portion import ShareResult
from shoal.serverrun.workline import Line, Worker


class Gathered:
    """The portions that a push is made of, as long as it grows."""

    def __init__(self) -> None:
        self._done: list[tuple[Portion, ShareResult]] = []

    def add(self, portion: Portion, result: ShareResult) -> None:
        """One more is computed."""
        self._done.append((portion, result))

    @property
    def portions(self) -> tuple[int, ...]:
        """Their numbers, in order."""
        return tuple(sorted(portion.number for portion, _ in self._done))

    def describe(self, worker: str, push: Push) -> Contribution:
        """What the book is told of the push; the next one begins empty."""
        assert push.num_gradients == len(self._done), "a push has the gradients of the portions that are held"
        results = [result for _, result in self._done]
        weight = sum(result.weight for result in results)
        contribution = Contribution(
            worker=worker,
            number=0,
            portions=self.portions,
            samples=sum(result.samples for result in results),
            weight=weight,
            loss=sum(result.mean_loss * result.weight for result in results) / weight if weight else 0.0,
            version=push.version,
        )
        self._done = []
        return contribution


class Downpour:
    """One worker's work under one name.

    Args:
        line: lands what it fetches beside the model's weights, not in them.
        worker: what computes.
        place: rule and recipe.
    """

    def __init__(self, line: Line, worker: Worker, place: MemberPlace) -> None:
        rule, recipe = place.rule, place.recipe
        self._line, self._worker, self._optim = line, worker, recipe.optim
        self._own_rate = recipe.paramserver.own_rate(place.index)
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
            portion = self._line.take(self._gathered.portions + self._pushed)
            if portion is not None:
                self._step(portion)
                continue
            # The end of the run, or the book wants what is held before it gives more.
            push = self._rule.flush()
            if push is None and self._pushing is None:
                return
            self._send(push)
            self._wait_for_push()

    def _step(self, portion: Portion) -> None:
        if self._rule.wants_fetch:
            self._fetch(portion)
        self._rule.begin_step()
        result = self._worker.shares.run(portion.step, portion.share)
        lr = self._own_rate or rate(self._optim, portion.step, self._worker.total_steps)
        self._gathered.add(portion, result)
        self._send(self._rule.end_step(self._worker.flat.collect_gradient(), lr))

    def _fetch(self, portion: Portion) -> None:
        is_first = self._fetching is None
        if self._fetching is not None:
            # One at a time: they land in one place. What it brought is taken up by the step that begins now.
            self._fetching.result()
        self._fetching = self._line.fetch(portion, self._rule.land)
        if is_first or not self._overlap:
            self._fetching.result()

    def _send(self, push: Push | None) -> None:
        if push is None:
            return
        self._wait_for_push()
        contribution = self._gathered.describe(self._line.identity, push)
        self._pushing = self._line.hand_in(push.gradient, contribution, push.read)
        self._pushed = contribution.portions
        if not self._overlap:
            self._wait_for_push()

    def _wait_for_push(self) -> None:
        if self._pushing is not None:
            self._pushing.result()
            self._pushing, self._pushed = None, ()


def work_downpour(line: Line, worker: Worker, place: MemberPlace) -> None:
    """Portions by the rule of Downpour.

    Raises:
        RunOver: the run ended meanwhile.
        Evicted: others do what this worker was doing.
    """
    Downpour(line, worker, place).run()
