"""Plans tried for a few real steps each, in turns, so that a machine that slows down for a while slows all of them. No torch."""

import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from shoal.core.errors import RunError
from shoal.elastic.pool import Pool
from shoal.trainer.config import Recipe
from shoal.trainer.layout import default_threads

_WARM = 2
"""Steps of every turn that are not counted."""
_DEADLINE = 300.0

Tell = Callable[[str], None]


@dataclass
class Tried:
    """What a plan's steps took."""

    plan: str
    seconds: list[float] = field(default_factory=list)
    """Of every counted step, on the slowest rank."""
    problem: str = ""
    """Why it could not be tried; empty where it could."""

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.seconds) if self.seconds else float("inf")


class Trial:
    """Rank processes that try plans of one recipe; use it as a context manager, which ends them."""

    def __init__(self, recipe: Recipe, num_processes: int) -> None:
        self._recipe = recipe
        self._threads = recipe.train.threads or default_threads(num_processes)
        self._pool = Pool("shoal.trainer.forecasts.stepper", num_processes, threads=self._threads)
        self._folder = tempfile.TemporaryDirectory(prefix="shoal-trial-")
        self._num_jobs = 0

    def run(self, plans: Sequence[str], *, steps: int, rounds: int = 2, tell: Tell | None = None) -> list[Tried]:
        """Try plans: so many steps each, in so many rounds over all of them.

        A plan that fails is given up with its reason; the others go on.
        """
        tried = [Tried(plan) for plan in plans]
        for turn in range(rounds):
            # Back and forth, so that no plan is always first.
            for one in tried if turn % 2 == 0 else reversed(tried):
                if not one.problem:
                    self._try(one, max(1, steps // rounds), tell)
        return tried

    def _try(self, one: Tried, steps: int, tell: Tell | None) -> None:
        if tell is not None:
            tell(f"trying {one.plan}")
        self._num_jobs += 1
        job = {
            "folder": self._folder.name,
            "store": f"store-{self._num_jobs}",
            "recipe": self._recipe.model_dump(mode="json"),
            "plan": one.plan,
            "threads": self._threads,
            "steps": _WARM + steps,
            "deadline_seconds": _DEADLINE,
        }
        try:
            answers = self._pool.run(job, deadline_seconds=_DEADLINE)
        except RunError as failure:
            one.problem = str(failure).splitlines()[0]
            return
        by_step = zip(*(answer["seconds"][_WARM:] for answer in answers), strict=True)
        one.seconds += [max(seconds) for seconds in by_step]

    def __enter__(self) -> "Trial":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.end()
        self._folder.cleanup()
