"""What a plan's step will take on this machine: what its rehearsed ranks said, the rest from measured constants. No torch.

How a schedule's cells follow one another, and which ranks then share the cores, is played by ``planner/local.py``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.core.plan import Plan
from shoal.engine.resolve import schedule_of
from shoal.planner.local import RankWork, predict_step
from shoal.planner.machine import Machine
from shoal.schedules.action import parse_action

Page = dict[str, Any]
"""A prediction as JSON: ``plan``, ``seconds``, ``compute_seconds``, ``communication_seconds`` by axis, ``bubble``,
``fixed_seconds``, and ``ranks``: what each will move and hold."""


def price_plan(plan: Plan, answers: Sequence[Mapping[str, Any]], machine: Machine, *, threads: int) -> Page:
    """The step of a derived plan.

    Args:
        plan: the plan.
        answers: of all its ranks, in their order (``company.py``).
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
