"""Predicted beside measured steps of all legal plans on this machine, and how far the plan that auto picks is from the fastest.

python benchmarks/planner_local/main.py --processes 2 [--minutes 10] [--picks 2] [--finals 10] [--recipe recipes/gpt.toml]

The machine drifts from minute to minute, so nothing is compared over minutes: in every round each plan is rehearsed and then run,
or run and then rehearsed, by the same processes, which stay up; plans come in an order that is shuffled; one plan is there twice.
The fastest and those that auto picked then meet in the finals: short rounds of real steps alone, as many as there is time for.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from judging import CONTROL, Pair, RoundPairs, Times, finalists, judge, judge_finals

from shoal.core.errors import RequestError, RunError
from shoal.core.plan import Plan
from shoal.planner.hardware.machine import Machine, cpu_name, num_cores, read_machine, torch_version
from shoal.trainer.config import load_recipe
from shoal.tuning.calibration import measure_machine
from shoal.tuning.plan_choice import pick_from, search
from shoal.tuning.rehearsal_pool import RehearsalPool

ROOT = Path(__file__).resolve().parents[2]
_FINALISTS = 6


class Bench:
    """One take: the processes, the machine's constants, and how long there is."""

    def __init__(self, pool: RehearsalPool, machine: Machine, *, steps: int, ends: float) -> None:
        self.pool = pool
        self.machine = machine
        self.steps = steps
        self.failed: dict[str, str] = {}
        self.picks: list[dict[str, Any]] = []
        self._ends = ends
        self._random = random.Random(0)

    def pick(self) -> None:
        """Let auto pick, as ``shoal train --plan auto`` does."""
        started = time.monotonic()
        decision = pick_from(self.pool, search(self.pool, self.machine, "measured for this take"))
        self.picks.append(
            {
                "plan": decision.plan,
                "seconds": time.monotonic() - started,
                "num_rehearsed": len(decision.ranked),
                "tried": [page["plan"] for page in decision.ranked if "tried_seconds" in page],
            }
        )
        say(f"auto picked {decision.plan} in {self.picks[-1]['seconds']:.0f} s")

    def round(self, plans: Sequence[str], fixed: str) -> RoundPairs | None:
        """Every plan once, the fixed one twice; None where there was no time for all."""
        found: dict[str, Pair] = {}
        names = [*(plan for plan in plans if plan not in self.failed), CONTROL]
        self._random.shuffle(names)
        for name in names:
            if time.monotonic() > self._ends:
                return None
            text = fixed if name == CONTROL else name
            try:
                found[name] = self._pair(Plan.parse(text))
            except (RequestError, RunError) as problem:
                self.failed[text] = str(problem).splitlines()[0]
                say(f"{text} cannot be run: {self.failed[text]}")
        return found

    def finals(self, plans: Sequence[str], fixed: str, *, ends: float) -> list[Times]:
        """Rounds of real steps of a few plans, until time is over."""
        found: list[Times] = []
        while time.monotonic() < ends:
            names = [*plans, CONTROL]
            self._random.shuffle(names)
            times: dict[str, float] = {}
            for name in names:
                text = fixed if name == CONTROL else name
                try:
                    times[name] = self._measure(Plan.parse(text))
                except (RequestError, RunError) as problem:
                    say(f"{text} failed in the finals, and this round does not count: {str(problem).splitlines()[0]}")
                    break
            else:
                found.append(times)
        return found

    def _pair(self, plan: Plan) -> Pair:
        if self._random.random() < 0.5:
            predicted = self._predict(plan)
            return Pair(predicted=predicted, measured=self._measure(plan))
        measured = self._measure(plan)
        return Pair(predicted=self._predict(plan), measured=measured)

    def _predict(self, plan: Plan) -> float:
        return float(self.pool.rehearse(plan, self.machine, steps=self.steps)["seconds"])

    def _measure(self, plan: Plan) -> float:
        return statistics.median(self.pool.play(plan, steps=self.steps))


def take(arguments: argparse.Namespace) -> dict[str, Any]:
    """The whole of it."""
    count, ends = arguments.processes, time.monotonic() + 60 * arguments.minutes
    if arguments.machine is None:
        say("measuring the machine")
    machine = (
        measure_machine(counts=sorted({1, 2, count}), log=say)
        if arguments.machine is None
        else read_machine(arguments.machine)
    )
    rounds: list[RoundPairs] = []
    with RehearsalPool(load_recipe(arguments.recipe, arguments.set), count) as pool:
        bench = Bench(pool, machine, steps=arguments.steps, ends=ends)
        plans = [str(plan) for plan in pool.legal_plans()]
        plans = [plan for plan in plans if not arguments.only or any(word in plan for word in arguments.only)]
        fixed = plans[0]
        say(f"{len(plans)} legal plans on {count} processes; {fixed} is there twice in every round")
        for number in range(arguments.rounds):
            # Picks are spread over the take: the machine of the first minutes is not that of the last.
            gone = max(number / arguments.rounds, 1 - (ends - time.monotonic()) / (60 * arguments.minutes))
            if len(bench.picks) < arguments.picks and gone >= len(bench.picks) / arguments.picks:
                bench.pick()
            started = time.monotonic()
            found = bench.round(plans, fixed)
            if found is None:
                say(f"the {arguments.minutes:g} minutes are over in round {number + 1}, which does not count")
                break
            rounds.append(found)
            say(f"round {number + 1} took {time.monotonic() - started:.0f} s")
        while not bench.picks and arguments.picks:
            bench.pick()
        if not rounds:
            sys.exit("not one round was whole: give more --minutes")
        shared = [plan for plan in rounds[0] if all(plan in one for one in rounds)]
        rounds = [{plan: one[plan] for plan in shared} for one in rounds]
        picks = [pick["plan"] for pick in bench.picks if pick["plan"] in shared]
        judged = judge(rounds, fixed=fixed, picks=picks)
        finals: list[Times] = []
        if arguments.finals:
            meeting = finalists(judged["plans"], picks, _FINALISTS)
            say(f"{len(meeting)} finalists meet for {arguments.finals:g} minutes")
            finals = bench.finals(meeting, meeting[0], ends=time.monotonic() + 60 * arguments.finals)
    return {
        "processes": count,
        "failed": bench.failed,
        "auto": bench.picks,
        **judged,
        "finals": judge_finals(finals, fixed=meeting[0], picks=picks) if len(finals) > 1 else None,
        "finals_rounds": finals,
        "rounds": [{plan: asdict(pair) for plan, pair in one.items()} for one in rounds],
        "sharing": [point.model_dump() for point in machine.sharing],
    }


def as_markdown(found: dict[str, Any]) -> str:
    """The README's table."""
    noise = found["noise"]
    lines = [
        "| processes | plans | rounds | mean error | within 10% | bias | Kendall tau | fastest | best predicted: regret |",
        "|---|---|---|---|---|---|---|---|---|",
        f"| {found['processes']} | {found['num_plans']} | {found['num_rounds']} | {found['mean_absolute_error']:.1%} | "
        f"{found['within_a_tenth']:.0%} | {found['signed_bias']:+.1%} | {found['kendall_tau']:.2f} | `{found['fastest']}` | "
        f"`{found['best_predicted']}`: {found['regret_of_best_predicted']:.1%} |",
        "",
        "| auto picked | regret | regret across rounds |",
        "|---|---|---|",
        *(
            f"| `{pick['plan']}` | {pick['regret']:.1%} | "
            f"{'-' if pick['regret_across_rounds'] is None else format(pick['regret_across_rounds'], '.1%')} |"
            for pick in found["picks"]
        ),
        "",
        f"One plan timed twice differs by {noise['measured_in_a_round']:.1%} in a round and {noise['measured_over_rounds']:.1%} "
        f"over rounds; predicted twice by {noise['predicted_in_a_round']:.1%} and {noise['predicted_over_rounds']:.1%}. "
        f"The median plan drifted by {noise['drift_of_the_machine']:.0%} from the fastest round to the slowest.",
    ]
    if finals := found["finals"]:
        lines += [
            "",
            "| finals: auto picked | regret | nine tenths of redrawn rounds | across rounds |",
            "|---|---|---|---|",
            *(
                f"| `{pick['plan']}` | {pick['regret']:.1%} | {pick['interval'][0]:.1%} to {pick['interval'][1]:.1%} | "
                f"{pick['regret_across_rounds']:.1%} |"
                for pick in finals["picks"]
            ),
            "",
            f"{finals['num_rounds']} rounds of {len(finals['plans'])} plans; the fastest, `{finals['plans'][0]['plan']}`; "
            f"one plan timed twice differs by {finals['same_plan_in_a_round']:.1%} in a round and "
            f"{finals['same_plan_over_rounds']:.1%} over rounds.",
        ]
    return "\n".join(lines)


def say(line: str) -> None:
    """Tell how far it is."""
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2, help="of every plan")
    parser.add_argument("--rounds", type=int, default=10, help="at most")
    parser.add_argument("--minutes", type=float, default=10.0, help="after which no turn is begun")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a rehearsal and of a run")
    parser.add_argument("--picks", type=int, default=2, help="how often auto is asked")
    parser.add_argument("--finals", type=float, default=10.0, help="minutes of the finals; 0 for none")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="plans that have one of these words")
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "gpt.toml")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--machine", type=Path, help="a file of `shoal calibrate`; measured when left out")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    started, load = time.monotonic(), os.getloadavg()
    found = take(arguments)
    results = {
        "date": str(date.today()),
        "cpu": cpu_name(),
        "cores": num_cores(),
        "torch": torch_version(),
        "load_before": [round(value, 1) for value in load],
        "load_after": [round(value, 1) for value in os.getloadavg()],
        "seconds": round(time.monotonic() - started),
        "recipe": arguments.recipe.name,
        "steps": arguments.steps,
        **found,
    }
    out = arguments.out or Path(__file__).parent / "results" / f"{date.today()}-{arguments.processes}.json"
    out.write_text(json.dumps(results, indent=1) + "\n")
    for row in found["plans"]:
        say(
            f"{row['measured_ms']:8.1f} ms measured {row['predicted_ms']:8.1f} predicted {row['error']:+7.1%} "
            f"(x{row['measured_ratio']:.2f} +-{row['spread']:.0%})  {row['plan']}"
        )
    print(as_markdown(results))


if __name__ == "__main__":
    main()
