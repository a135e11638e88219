"""The rehearsal pool: processes that rehearse plans of one recipe and take real steps of them, seen from the launcher. No torch.

They stay up over many plans (``rehearsal_worker.py``). A plan that needs more memory than there is makes its processes fail or
die; the plan is then known not to fit, and the next job has fresh ones. The time of a plan's step is made of what its rehearsed
ranks measured and of the machine's constants; how a schedule's cells follow one another, and which ranks then share the cores,
is played by ``planner/pricing/local.py``.
"""

import tempfile
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from shoal.core.errors import RequestError, RunError
from shoal.core.plan import Plan
from shoal.core.units import format_bytes
from shoal.engine.resolve import default_threads, resolve_plan, schedule_of
from shoal.launch.pool import Pool
from shoal.planner.hardware.machine import Machine
from shoal.planner.pricing.local import RankWork, predict_step
from shoal.schedules.schedule import parse_action
from shoal.telemetry.memory import free_bytes, tells_of_memory
from shoal.trainer.config import Recipe

Page = dict[str, Any]
"""A prediction as JSON: ``plan``, ``seconds``, ``compute_seconds``, ``communication_seconds`` by axis, ``bubble``,
``fixed_seconds``, and ``ranks``: what each will move and hold."""


def price_plan(plan: Plan, answers: Sequence[Mapping[str, Any]], machine: Machine, *, threads: int) -> Page:
    """The step of a derived plan.

    Args:
        plan: the plan.
        answers: of all its ranks, in their order (``joint_rehearsal.py``).
        machine: its constants.
        threads: of a rank.
    """
    per_place = plan.world_size // plan.pp
    places = [answers[start : start + per_place] for start in range(0, plan.world_size, per_place)]
    time = predict_step(
        plan,
        schedule_of(plan) if plan.pp > 1 else None,
        [_work(place, threads) for place in places],
        machine,
        slow_down=answers[0]["slow_down"],
    )
    return {
        "plan": str(plan),
        "seconds": time.seconds,
        "compute_seconds": time.compute,
        "communication_seconds": dict(time.communication),
        "bubble": time.bubble,
        "fixed_seconds": time.fixed,
        "ranks": [
            {"state_bytes": answer["state"], "traffic": answer["traffic"], "peak_bytes": _peak(answer, machine)}
            for answer in answers
        ],
    }


def held_bytes(page: Mapping[str, Any], machine: Machine) -> float:
    """What all ranks together hold at most; activations left out where the system does not say."""
    return float(
        sum(
            machine.rank_bytes + sum(rank["state_bytes"].values()) if rank["peak_bytes"] is None else rank["peak_bytes"]
            for rank in page["ranks"]
        )
    )


def _peak(answer: Mapping[str, Any], machine: Machine) -> int | None:
    """The most memory that a rank will have; None where the system does not say."""
    if answer["grown_bytes"] is None:
        return None
    return int(machine.rank_bytes + answer["loaded_bytes"] + answer["grown_bytes"])


def _work(place: Sequence[Mapping[str, Any]], threads: int) -> RankWork:
    """Of the ranks of one pipeline place: they do the same, and the slowest is waited for."""
    slowest = max(place, key=lambda answer: float(answer["seconds"]))
    return RankWork(
        seconds=slowest["seconds"],
        cells={parse_action(text): seconds for text, seconds in slowest["cells"].items()},
        traffic={_key(name): (moved[0], moved[1]) for name, moved in slowest["traffic"].items()},
        threads=threads,
    )


def _key(name: str) -> tuple[str, str]:
    axis, _, operation = name.partition(" ")
    return axis, operation


WARM = 1
"""First real steps of a turn, which are not counted; the median takes care of the next, in which DDP cuts its buckets anew."""
MEMORY_SHARE = 0.9
"""Of the memory that is free, what the processes of a plan may take together."""
_TIMED = 4
_DEADLINE = 300.0
_KILLED = "ended with code -9"


class NoRoom(RequestError):
    """A plan does not fit the machine's memory."""


class RehearsalPool:
    """Processes that play plans of one recipe; use it as a context manager, which ends them.

    Args:
        recipe: as it would be trained.
        num_processes: ranks of every plan.
        memory_bytes: what they may take together; most of what is free, when left out.
    """

    def __init__(self, recipe: Recipe, num_processes: int, *, memory_bytes: int | None = None) -> None:
        self.recipe = recipe
        self.num_processes = num_processes
        self.threads = recipe.train.threads or default_threads(num_processes)
        self._pool = Pool("shoal.tuning.rehearsal_worker", num_processes, threads=self.threads)
        self._folder = tempfile.TemporaryDirectory(prefix="shoal-pool-")
        self._memory_bytes = memory_bytes
        self._num_jobs = 0

    def legal_plans(self, num_processes: int | None = None) -> list[Plan]:
        """The plans that may be picked, derived; plain ones first.

        Args:
            num_processes: of every plan; as many as there are here when left out.

        Raises:
            NoRoom: the model does not fit.
            RequestError: model or data are wrong.
        """
        count = num_processes or self.num_processes
        return [Plan.parse(text) for text in self._run("the model and its data", kind="legal", count=count)[0]["plans"]]

    def rehearse(self, plan: Plan, machine: Machine, *, steps: int = _TIMED) -> Page:
        """The predicted step of a plan.

        Args:
            plan: of as many ranks as there are processes.
            machine: its constants.
            steps: to be timed.

        Raises:
            NoRoom: the plan does not fit the machine's memory.
            RequestError: it is asynchronous, does not fit the model, or has another number of ranks.
            RunError: a process failed in another way.
        """
        plan = resolve_plan(self.recipe.train, plan).plan
        if plan.world_size != self.num_processes:
            raise RequestError(
                f"plan {str(plan)!r} has {plan.world_size} ranks, and {self.num_processes} processes rehearse"
            )
        answers = self._run(f"plan {plan}", kind="rehearse", plan=plan, steps=steps)
        if problem := _first_answer(answers, "no_memory"):
            raise NoRoom(f"plan {plan} does not fit: {problem}")
        if problem := _first_answer(answers, "refused"):
            raise RequestError(problem)
        # Who only left because another did is not the one to listen to.
        if problem := _first_answer(answers, "failed") or _first_answer(answers, "left"):
            raise RunError(problem)
        return price_plan(plan, answers, machine, threads=self.threads)

    def play(self, plan: Plan, *, steps: int) -> tuple[float, ...]:
        """The seconds of so many real steps of a plan on the slowest rank, after some that are not counted.

        Raises:
            NoRoom: the plan does not fit the machine's memory.
            RunError: a process failed, or hung.
        """
        answers = self._run(f"plan {plan}", kind="play", plan=plan, steps=WARM + steps)
        by_step = zip(*(answer["seconds"][WARM:] for answer in answers), strict=True)
        return tuple(max(seconds) for seconds in by_step)

    def _run(
        self, what: str, *, kind: str, plan: Plan | None = None, steps: int = 0, count: int = 0
    ) -> list[dict[str, Any]]:
        self._num_jobs += 1
        free = MEMORY_SHARE * free_bytes() if self._memory_bytes is None else self._memory_bytes
        job = {
            "kind": kind,
            "folder": self._folder.name,
            "store": f"store-{self._num_jobs}",
            "recipe": self.recipe.model_dump(mode="json"),
            "plan": str(plan),
            "threads": self.threads,
            "steps": steps,
            "count": count,
            "deadline_seconds": _DEADLINE,
            # Ranks of a pipeline hold what their stages are; all others hold alike.
            "most_bytes": int(free if plan is not None and plan.pp > 1 else free / self.num_processes),
        }
        try:
            return self._pool.run(job, deadline_seconds=_DEADLINE)
        except RunError as failure:
            # Nobody else kills them: the kernel did, which takes these processes first when memory runs out.
            if tells_of_memory(str(failure)) or _KILLED in str(failure):
                raise NoRoom(
                    f"{what} does not fit the memory of this machine, of which {format_bytes(int(free))} can be used: "
                    f"{str(failure).splitlines()[0]}"
                ) from failure
            raise

    def __enter__(self) -> "RehearsalPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.end()
        self._folder.cleanup()


def _first_answer(answers: Sequence[dict[str, Any]], kind: str) -> str:
    return next((str(answer[kind]) for answer in answers if kind in answer), "")
