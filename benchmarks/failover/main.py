"""Kill servers, centers and workers of one run, again and again: how long until training goes on, and what was lost.

python benchmarks/failover/main.py [--kills 100] [--backup 1]
"""

import argparse
import asyncio
import json
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from observed_job import NUM_WORKERS, Newcomer, ObservedJob, Process, train_undisturbed

from shoal.elastic.view import View

HERE = Path(__file__).resolve().parent
KINDS = ("server", "center", "worker", "nobody")
AIMS = {"server": 1.0, "center": 3.0}
"""Seconds, of p99."""
BETWEEN_UPDATES = 3
"""Updates that are made between a whole job and the next kill."""
MOMENT_SECONDS = 0.3
"""Then a random wait of up to this: any moment of a step."""


async def choose(job: ObservedJob, kind: str, view: View, dice: random.Random) -> tuple[Process | None, bool]:
    """Whom to kill, and whether it leads the update log."""
    processes = job.processes()
    if kind == "nobody":
        return None, False
    if kind == "server":
        victim = dice.choice(sorted({chain.primary for chain in view.chains}))
        return processes[view.member(victim).name], view.chains[0].primary == victim
    name = job.leader() if kind == "center" else dice.choice(view.workers).name
    assert name is not None, "a whole job has a center"
    return processes[name], False


async def strike(job: ObservedJob, newcomer: Newcomer, kind: str, dice: random.Random) -> dict[str, Any]:
    """One kill, at a random moment of a whole job at work, and everything until the job is whole again."""
    records = job.records
    await job.until_whole()
    records.read()
    enough = records.num_made(time.monotonic()) + BETWEEN_UPDATES
    await until_made(job, enough)
    await asyncio.sleep(dice.uniform(0.0, MOMENT_SECONDS))
    view = await job.until_whole()
    victim, leads_log = await choose(job, kind, view, dice)
    job.killed |= {member.id for member in view if victim is not None and member.name == victim.name}
    killed = time.monotonic()
    if victim is not None:
        os.kill(victim.pid, signal.SIGKILL)
    if kind == "center":
        newcomer.ask_to_join()
    records.read()
    first = records.num_made(killed)
    # Updates count from 0: this is the second update after the last one that was made before the kill.
    await until_made(job, first + 2)
    goes_on = records.made[first + 1]
    if kind == "center":
        goes_on = await until_accepted(job, newcomer, view)
        await newcomer.leave()
    await job.until_whole()
    whole = time.monotonic()
    records.read()
    return {
        "kind": kind,
        "victim": None if victim is None else victim.name,
        "leads_log": leads_log,
        "goes_on_s": goes_on - killed,
        "pause_s": records.longest_pause(killed, max(goes_on, records.made[first + 1])),
        "whole_s": whole - killed,
    }


async def until_made(job: ObservedJob, num: int) -> None:
    """Wait until so many updates are made."""

    async def are_made() -> bool:
        job.records.read()
        return num - 1 in job.records.made

    await job.wait_for(are_made, f"update {num}")


async def until_accepted(job: ObservedJob, newcomer: Newcomer, before: View) -> float:
    """When the last of the members of a view has gone by one that has the newcomer in it."""

    async def is_let_in() -> bool:
        return newcomer.view is not None

    await job.wait_for(is_let_in, "the newcomer to be let in")
    assert newcomer.view is not None
    epoch = newcomer.view.epoch

    async def have_seen() -> bool:
        job.records.read()
        return all(job.records.seen(member.id, epoch) is not None for member in before)

    await job.wait_for(have_seen, f"all members to go by epoch {epoch}")
    return max(job.records.seen(member.id, epoch) or math.inf for member in before)


def summarise(kills: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By kind: p50, p99 (nearest rank) and the longest of each time."""
    rows = []
    for kind in KINDS:
        of_kind = [kill for kill in kills if kill["kind"] == kind]
        row: dict[str, Any] = {"kind": kind, "kills": len(of_kind)}
        for name in ("goes_on_s", "pause_s", "whole_s"):
            values = sorted(kill[name] for kill in of_kind)
            for label, part in (("p50", 0.50), ("p99", 0.99), ("max", 1.0)):
                row[f"{name}_{label}"] = values[math.ceil(part * len(values)) - 1] if values else None
        row["aim_p99_s"] = AIMS.get(kind)
        rows.append(row)
    return rows


async def measure(options: argparse.Namespace, folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """All kills in one run; what each took, and the run's records at its end."""
    dice = random.Random(options.seed)
    order = [kind for kind in options.kinds for _ in range(options.kills)]
    dice.shuffle(order)
    kills = []
    async with ObservedJob(folder, backup=options.backup) as job:
        await job.until_whole()
        newcomer = Newcomer(job)
        began = time.monotonic()
        for count, kind in enumerate(order):
            kills.append(await strike(job, newcomer, kind, dice))
            last = kills[-1]
            print(
                f"{count + 1}/{len(order)} {last['victim'] or 'nobody'}: goes on after {last['goes_on_s']:.3f} s, "
                f"pause {last['pause_s']:.3f} s, whole after {last['whole_s']:.2f} s",
                file=sys.stderr,
            )
        seconds = time.monotonic() - began
        summary = await asyncio.to_thread(job.stop)
        balance = job.records.balance(NUM_WORKERS)
    return kills, {"seconds": seconds, "summary": summary, "balance": balance}


def report(results: dict[str, Any]) -> bool:
    """Print the tables; whether nothing was lost and the aims were met."""
    print("victim    kills   goes on: p50     p99     max   pause: p50     p99     max   whole: p50     p99")
    is_good = True
    for row in results["rows"]:
        if row["kills"]:
            print(
                f"{row['kind']:9} {row['kills']:5}     "
                + "   ".join(
                    "   ".join(f"{row[f'{name}_{label}']:7.3f}"[:7] for label in labels)
                    for name, labels in (
                        ("goes_on_s", ("p50", "p99", "max")),
                        ("pause_s", ("p50", "p99", "max")),
                        ("whole_s", ("p50", "p99")),
                    )
                )
            )
            is_good &= row["aim_p99_s"] is None or row["goes_on_s_p99"] < row["aim_p99_s"]
    for name, count in results["balance"].items():
        print(f"{name.replace('_', ' '):40} {count}")
    print(f"weights after {results['steps']} steps          the bits of an undisturbed dp=2: {results['is_bitwise']}")
    faults = ("missing_updates", "lost", "in_two_updates", "applied_twice_by_a_server", "updates_rewritten")
    return is_good and results["is_bitwise"] is not False and not any(results["balance"][name] for name in faults)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--backup", type=int, choices=(0, 1), default=1, help="0: see that the count can find a loss")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-results", action="store_true", help="only print")
    parser.add_argument("--no-reference", action="store_true", help="do not train again undisturbed to compare weights")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        kills, end = asyncio.run(measure(options, Path(name)))
        steps = end["summary"]["steps"]
        undisturbed = None if options.no_reference else train_undisturbed(Path(name), steps)
    results = {
        "date": str(date.today()),
        "cpus": os.cpu_count(),
        "backup": options.backup,
        "seconds": end["seconds"],
        "steps": steps,
        "deaths": end["summary"]["deaths"],
        "rows": summarise(kills),
        "balance": end["balance"],
        "weights_sha256": end["summary"]["weights_sha256"],
        "undisturbed_sha256": undisturbed,
        "is_bitwise": None if undisturbed is None else undisturbed == end["summary"]["weights_sha256"],
        "kills": kills,
    }
    is_good = report(results)
    if not options.no_results:
        (HERE / "results" / f"{date.today()}.json").write_text(json.dumps(results, indent=1) + "\n")
    raise SystemExit(0 if is_good else 1)


if __name__ == "__main__":
    main()
