"""Goodput over a simulated month: restart from a checkpoint, shrink, and spares, by the real decisions of ``elastic/group.py``.

python benchmarks/goodput/main.py [--seeds 10]
"""

import argparse
import heapq
import json
import math
import random
import statistics
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from shoal.elastic.group import step
from shoal.elastic.groupchanges import Died, Event, Heard, Joined, Order, Publish, Ready
from shoal.elastic.groupstate import State, Wanted

HERE = Path(__file__).resolve().parent
FIGURE = HERE.parents[1] / "docs" / "figures" / "goodput.svg"
MONTH = 30 * 86400.0
STEP = 10.0
RESTART, SAVE = 600.0, 5.0
"""Seconds to notice, start again and load; and that a save stops the run."""
PAUSE, START = 3.0, 120.0
"""Seconds until survivors go on; until a replica that is started can take part."""
HARDWARE, REPAIR = 0.25, 86400.0
"""The share of failures after which a place is out of service, and for how long on average."""
SPARES = 4


@dataclass(frozen=True)
class Case:
    """A cluster and its failures."""

    name: str
    devices: int
    places: int
    """Replicas that there is room for."""
    hours: float
    """Between failures, of the whole cluster."""


CASES = (
    Case("1,000 devices, RSC's rate", 1000, 125, 7.9 * 1024 / 1000),
    Case("1,000 devices, Llama 3's rate", 1000, 125, 54 * 24 / 419 * 16384 / 1000),
    Case("16,000 devices, RSC's rate", 16000, 125, 1.8 * 16384 / 16000),
    Case("16,000 devices, Llama 3's rate", 16000, 125, 54 * 24 / 419 * 16384 / 16000),
)


def restart(case: Case, seed: int) -> float:
    """All start again from the newest checkpoint; four places are kept for those that are being repaired."""
    draw = random.Random(seed)
    every = math.sqrt(2 * SAVE * case.hours * 3600)  # Young's interval
    now = done = 0.0
    while now < MONTH:
        up = min(draw.expovariate(1 / (case.hours * 3600)), MONTH - now)
        done += math.floor(up / (every + SAVE)) * every
        now += up + RESTART
    return done / MONTH * (case.places - SPARES) / case.places


def elastic(case: Case, seed: int, *, spares: int, logical: int, scales: bool) -> float:
    """Survivors go on; ``logical`` replicas for each present one."""
    draw = random.Random(seed)
    active = case.places - spares
    wanted = Wanted(num_logical=active, spares=spares, scales=scales, max_failures=10**9, join_seconds=1e12)
    state, now, done, paused, count = State(wanted=wanted), 0.0, 0.0, 0.0, 0
    queue: list[tuple[float, int, str, Any]] = []

    def push(at: float, kind: str, what: Any) -> None:
        nonlocal count
        count += 1
        heapq.heappush(queue, (at, count, kind, what))

    def tell(event: Event) -> None:
        nonlocal state, paused
        state, instructions = step(state, event)
        for one in instructions:
            if isinstance(one, Order):
                push(now + START, "start", one)
            elif isinstance(one, Publish):
                paused += PAUSE + draw.uniform(0, STEP)

    for place in range(case.places):
        tell(Heard(host=f"p{place}", slots=1, now=0.0))
    for place in range(active):
        for event in (
            Joined(member=f"r{place}", replica=f"replica-{place}", host=f"p{place}", now=0.0),
            Ready(member=f"r{place}", now=0.0),
        ):
            tell(event)
    paused = 0.0
    push(draw.expovariate(1 / (case.hours * 3600)), "fail", None)
    while queue:
        at, _, kind, what = heapq.heappop(queue)
        at = min(at, MONTH)
        present = len(state.view.replicas) if state.view is not None else 0
        span = max(0.0, at - now - paused)
        paused = max(0.0, paused - (at - now))
        if present:
            share = present / active if scales else logical / math.ceil(logical * active / present)
            done += span * share
        now = at
        if now >= MONTH:
            break
        if kind == "fail":
            push(now + draw.expovariate(1 / (case.hours * 3600)), "fail", None)
            place = f"p{draw.randrange(case.places)}"
            if draw.random() < HARDWARE:
                tell(Heard(host=place, slots=0, now=now))
                push(now + draw.expovariate(1 / REPAIR), "repair", place)
            for unit in [unit for unit in state.units.values() if place in unit.hosts.values()]:
                tell(Died(member=unit.members[0], cause="failed", now=now))
        elif kind == "repair":
            tell(Heard(host=what, slots=1, now=now))
        elif kind == "start" and what.replica in state.ordered:
            member = f"m-{what.replica}"
            tell(Joined(member=member, replica=what.replica, host=what.host, spare=what.spare, now=now))
            tell(Ready(member=member, now=now))
    return done / MONTH * active / case.places


POLICIES = {
    "restart": restart,
    "shrink, batch held, 1 logical each": lambda case, seed: elastic(case, seed, spares=0, logical=1, scales=False),
    "shrink, batch held, 8 logical each": lambda case, seed: elastic(case, seed, spares=0, logical=8, scales=False),
    "shrink, batch scaled": lambda case, seed: elastic(case, seed, spares=0, logical=1, scales=True),
    "4 spares, batch held": lambda case, seed: elastic(case, seed, spares=SPARES, logical=1, scales=False),
}


def draw_svg(found: dict[str, dict[str, list[float]]]) -> str:
    """Bars, a group for each case."""
    rows = [(case, name, statistics.mean(values)) for case, bars in found.items() for name, values in bars.items()]
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" width="800" height="{26 * len(rows) + 20}" font-size="12">']
    lines.append('<rect width="100%" height="100%" fill="#ffffff"/>')
    for place, (case, name, value) in enumerate(rows):
        y = 10 + 26 * place
        lines.append(
            f'<text x="400" y="{y + 14}" text-anchor="end">{case}: {name}</text><rect x="410" y="{y}" height="18" '
            f'width="{320 * value:.1f}" fill="#0969da"/><text x="{416 + 320 * value:.1f}" y="{y + 14}">{value:.1%}</text>'
        )
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> None:
    """Simulate, print, and write the results and the picture."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=10)
    seeds = range(parser.parse_args().seeds)
    found = {
        case.name: {name: [policy(case, seed) for seed in seeds] for name, policy in POLICIES.items()} for case in CASES
    }
    for case, bars in found.items():
        for name, values in bars.items():
            print(f"{case:32} {name:36} {statistics.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})")
    (HERE / "results" / f"{date.today()}.json").write_text(json.dumps(found, indent=1) + "\n")
    FIGURE.write_text(draw_svg(found))


if __name__ == "__main__":
    main()
